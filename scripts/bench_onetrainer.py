"""Compare latentcache in OneTrainer's pipeline with mgds' DiskCache: one sample, a warm epoch, a warm start, filling.

    python scripts/bench_onetrainer.py              # a table; takes a minute and 1 GB of disk

Needs a clone of the project, because the pipelines' host belongs to the tests. If mgds can be imported (installed, or
with its `src` in MGDS_SRC), both caches run in mgds' own pipeline. Otherwise only latentcache runs, in the tests' host.

Samples are of SDXL at 1024x1024 in float16, 450 KB each, and encoders return random values. The caches and the sorting
modules have the settings of OneTrainer's loader. All files are in the page cache. The methods alternate in each round;
figures are medians, with minimum and maximum. An epoch is its start and reading all items one by one through the
sorting modules. A warm start is that of the caches in a new pipeline. Filling is measured once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
from benchmarking import in_turns, make_parser, ratios, run_parts, seconds_of, spread
from helpers import pipeline_host, pipeline_modules
from helpers.pipeline_sdxl import RECORDED, concept

SETTINGS = dict(RECORDED["modules"])
CACHES = {given["cache_dir"]: given for name, given in RECORDED["modules"] if name == "DiskCache"}
"""OneTrainer's settings of the modules by name, and of its two caches."""
SETTLED_S = 2.5
"""Digests of files younger than two seconds are not cached."""


def sample_values(number: int, scale: int) -> Mapping[str, Any]:
    """One sample's values; `scale` divides the sides."""
    generator = torch.Generator().manual_seed(number)

    size = (1024 // scale, 1024 // scale) if number % 2 else (1216 // scale, 832 // scale)
    shapes = {
        "latent_image": (4, size[0] // 8, size[1] // 8),
        "text_encoder_1_hidden_state": (77, 768 // scale),
        "text_encoder_2_hidden_state": (77, 1280 // scale),
        "text_encoder_2_pooled_state": (1280 // scale,),
    }
    return {
        **{name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()},
        **{name: torch.randint(0, 49408, (77,), generator=generator) for name in ("tokens_1", "tokens_2")},
        "original_resolution": size,
        "crop_offset": (0, 0),
        "crop_resolution": size,
    }


def encode(module: Any, item: pipeline_modules.Item) -> dict[str, Any]:
    """Stands for an encoder: returns the values of the sample with the number in its file name or text."""
    values = sample_values(int(Path(item(module.in_name)).stem), module.scale)
    return {name: values[name] for name in module.get_outputs()}


class Bench:
    """A warm pipeline for each cache, over the same folder."""

    def __init__(self, folder: Path, num_samples: int, scale: int):
        self.folder, self.num_samples, self.scale = folder, num_samples, scale
        sys.path += filter(None, [os.environ.get("MGDS_SRC")])
        has_mgds = importlib.util.find_spec("mgds") is not None
        self.host = pipeline_host.host("mgds" if has_mgds else "own")
        self.classes = {"latentcache": self.host.LatentCacheModule}
        if has_mgds:
            self.classes["disk_cache"] = importlib.import_module("mgds.pipelineModules.DiskCache").DiskCache
        photos = folder / "photos"
        photos.mkdir()
        for number in range(num_samples):
            (photos / f"{number:06}.png").write_bytes(f"file {number}".encode() * 100)
            (photos / f"{number:06}.txt").write_text(str(number), encoding="utf-8")
        time.sleep(SETTLED_S)
        self.caches: dict[str, list[Any]] = {}
        self.pipelines: dict[str, Any] = {}
        self.fill_s = {name: self.start(name) for name in self.classes}

    def pipeline(self, name: str) -> Any:
        make, make_own = self.host.make, pipeline_modules.module_maker(self.host)
        self.caches[name] = [
            self.classes[name](**given | {"cache_dir": str(self.folder / name / kind), "before_cache_fun": None})
            for kind, given in CACHES.items()
        ]
        encoded = {"image_path": [*CACHES["image"]["split_names"], "crop_resolution"]}
        encoded["prompt"] = CACHES["text"]["split_names"]
        encoders = [
            make_own("Encoder", in_name=source, scale=self.scale, **{f"{each}_out_name": each for each in outputs})
            for source, outputs in encoded.items()
        ]
        names = [*encoded["image_path"], "image_path", *encoded["prompt"], "prompt"]
        modules = [
            make("ConceptPipelineModule", concepts=[concept(self.folder / "photos")]),
            make("SettingsPipelineModule", settings={}),
            make("CollectPaths", **SETTINGS["CollectPaths"] | {"extensions": [".png"]}),
            make("ModifyPath", in_name="image_path", out_name="text_path", postfix="", extension=".txt"),
            make("LoadMultipleTexts", path_in_name="text_path", texts_out_name="texts"),
            make("SelectRandomText", texts_in_name="texts", text_out_name="prompt"),
            *encoders,
            *self.caches[name],
            make("VariationSorting", **SETTINGS["VariationSorting"] | {"names": ["prompt", "concept"]}),
            make("AspectBatchSorting", **SETTINGS["AspectBatchSorting"] | {"names": names}),
            make("OutputPipelineModule", names=names),
        ]
        state = self.host.PipelineState(2)
        return self.host.LoadingPipeline(device=torch.device("cpu"), modules=modules, batch_size=1, seed=1, state=state)

    def start(self, name: str) -> float:
        """Start a new pipeline, and return the seconds that its caches take."""
        seconds, start = list[float](), self.classes[name].start

        def timed(cache: Any, epoch: int) -> None:
            seconds.append(seconds_of(partial(start, cache, epoch)))

        self.pipelines[name] = self.pipeline(name)
        with patch.object(self.classes[name], "start", timed):
            self.pipelines[name].start_next_epoch()
        return sum(seconds)

    def get_items(self, name: str) -> None:
        """Read image and text of each sample directly from the caches."""
        image, text = self.caches[name]
        for index in range(self.num_samples):
            image.get_item(index, "latent_image")
            text.get_item(index, "tokens_1")

    def epoch(self, name: str) -> None:
        """Start an epoch and read every item."""
        self.pipelines[name].start_next_epoch()
        num_items = sum(1 for _ in self.pipelines[name])
        assert num_items == self.num_samples, f"{name}: an epoch has {num_items} items"


def sdxl(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    num_samples, scale = (6, 16) if options.tiny else (1000, 1)
    found: dict[str, dict[str, list[float]]] = {}
    with (
        contextlib.redirect_stderr(io.StringIO()),  # hides the progress bars
        patch.dict(pipeline_modules.GIVE, {"Encoder": encode}),
    ):
        bench = Bench(folder, num_samples, scale)
        for name in bench.classes:
            bench.epoch(name)
        for what, method, warm in (("get_item", bench.get_items, True), ("epoch", bench.epoch, False)):
            methods = {name: partial(seconds_of, partial(method, name)) for name in bench.classes}
            found[what] = in_turns(methods, options.repetitions, warm=warm)
        starts = {name: partial(bench.start, name) for name in bench.classes}
        found["warm_start"] = in_turns(starts, options.repetitions)
        found["fill"] = {name: [seconds] for name, seconds in bench.fill_s.items()}
    result: dict[str, Any] = {
        what: {name: spread([each / num_samples for each in values]) for name, values in seconds.items()}
        for what, seconds in found.items()
    }
    wanted = {"get_item": 5, "epoch": 2, "warm_start": 0.9, "fill": 0.9}
    result = {"num_samples": num_samples, "seconds_per_sample": result, "wanted_speedup": wanted}
    if "disk_cache" in bench.classes:
        result["speedup"] = {what: ratios(each["disk_cache"], each["latentcache"]) for what, each in found.items()}
    return result


PARTS = {"sdxl": sdxl}

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(run_parts(PARTS, make_parser(__doc__, PARTS).parse_args()))
