"""Compare latentcache in OneTrainer's pipeline with mgds' DiskCache: one sample, a warm epoch, a warm start, filling.

    python scripts/bench_onetrainer.py              # a table; takes a minute and 1 GB of disk
    python scripts/bench_onetrainer.py --json       # one document
    python scripts/bench_onetrainer.py --tiny       # for correctness only

Needs a clone of the project, because the pipelines' host belongs to the tests. If mgds can be imported (installed, or
with its `src` in MGDS_SRC), both caches run in mgds' own pipeline. Otherwise only latentcache runs, in the tests' host.

Samples are of SDXL at 1024x1024 in float16, 450 KB each, and encoders return random values. All files are in the page
cache. The methods alternate in each round; figures are medians, with minimum and maximum. An epoch is its start and
reading all items one by one through the sorting modules. Filling is measured once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from benchmarking import in_turns, make_parser, parse, ratios, run_parts, seconds_of, spread

TESTS = Path(__file__).parents[1] / "tests"
SPLIT = {
    "image": ["latent_image", "original_resolution", "crop_offset"],
    "text": [
        "tokens_1",
        "text_encoder_1_hidden_state",
        "tokens_2",
        "text_encoder_2_hidden_state",
        "text_encoder_2_pooled_state",
    ],
}
AGGREGATE = {"image": ["crop_resolution", "image_path"], "text": []}
GROUP = ["concept.path", "concept.seed", "concept.include_subdirectories"]
SETTLED_S = 2.5
"""Digests of files younger than two seconds are not cached."""
WANTED_SPEEDUP = {"get_item": 5, "epoch": 2, "warm_start": 0.9, "fill": 0.9}

Values = Mapping[str, Any]


def sample_values(number: int, scale: int) -> Values:
    """One sample's values; `scale` divides the sides."""
    generator = torch.Generator().manual_seed(number)

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).half()

    size = (1024 // scale, 1024 // scale) if number % 2 else (1216 // scale, 832 // scale)
    tokens = torch.randint(0, 49408, (77,), generator=generator)
    return {
        "latent_image": half(4, size[0] // 8, size[1] // 8),
        "original_resolution": size,
        "crop_offset": (0, 0),
        "crop_resolution": size,
        "tokens_1": tokens,
        "text_encoder_1_hidden_state": half(77, 768 // scale),
        "tokens_2": tokens.clone(),
        "text_encoder_2_hidden_state": half(77, 1280 // scale),
        "text_encoder_2_pooled_state": half(1280 // scale),
    }


def encoder_class(host: SimpleNamespace) -> type:
    class BenchEncoder(host.PipelineModule, host.RandomAccessPipelineModule):  # type: ignore[misc,name-defined]
        """Stands for an encoder: returns the values of the sample with the number in its file name or text."""

        def __init__(self, in_name: str, out_names: list[str], scale: int):
            super().__init__()
            self.in_name, self.out_names, self.scale = in_name, out_names, scale

        def length(self) -> int:
            return int(self._get_previous_length(self.in_name))

        def get_inputs(self) -> list[str]:
            return [self.in_name]

        def get_outputs(self) -> list[str]:
            return self.out_names

        def get_item(self, variation: int, index: int, requested_name: str | None = None) -> dict[str, Any]:
            value = self._get_previous_item(variation, self.in_name, index)
            number = int(Path(value).stem if self.in_name == "image_path" else value)
            values = sample_values(number, self.scale)
            return {name: values[name] for name in self.out_names}

    return BenchEncoder


class Bench:
    """A warm pipeline for each cache, over the same folder."""

    def __init__(self, folder: Path, num_samples: int, scale: int):
        self.folder, self.num_samples, self.scale = folder, num_samples, scale
        sys.path.insert(0, str(TESTS))
        pipeline_host = importlib.import_module("helpers.pipeline_host")
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
        self.encoder = encoder_class(self.host)
        time.sleep(SETTLED_S)
        self.pipelines = {name: self.pipeline(name) for name in self.classes}
        self.fill_s = {name: self.start(name, pipeline) for name, pipeline in self.pipelines.items()}

    def pipeline(self, name: str) -> Any:
        host = self.host
        paths = {"path": str(self.folder / "photos"), "include_subdirectories": False, "enabled": True, "seed": 1}
        counts = {"balancing": 1.0, "balancing_strategy": "REPEATS", "variations": 1}
        names = [*SPLIT["image"], *AGGREGATE["image"], *SPLIT["text"], "prompt"]
        grouping = {
            "balancing_in_name": "concept.balancing",
            "balancing_strategy_in_name": "concept.balancing_strategy",
            "variations_group_in_name": GROUP,
            "group_enabled_in_name": "concept.enabled",
        }
        caches = [
            self.classes[name](
                cache_dir=str(self.folder / name / kind),
                split_names=SPLIT[kind],
                aggregate_names=AGGREGATE[kind],
                variations_in_name="concept.variations",
                **grouping,
            )
            for kind in SPLIT
        ]
        modules = [
            host.make("ConceptPipelineModule", concepts=[paths | counts]),
            host.make("SettingsPipelineModule", settings={}),
            host.make(
                "CollectPaths",
                concept_in_name="concept",
                path_in_name="path",
                include_subdirectories_in_name="concept.include_subdirectories",
                enabled_in_name="enabled",
                path_out_name="image_path",
                concept_out_name="concept",
                extensions=[".png"],
                include_postfix=None,
                exclude_postfix=[],
            ),
            host.make("ModifyPath", in_name="image_path", out_name="text_path", postfix="", extension=".txt"),
            host.make("LoadMultipleTexts", path_in_name="text_path", texts_out_name="texts"),
            host.make("SelectRandomText", texts_in_name="texts", text_out_name="prompt"),
            self.encoder("image_path", [*SPLIT["image"], "crop_resolution"], self.scale),
            self.encoder("prompt", SPLIT["text"], self.scale),
            *caches,
            host.make("VariationSorting", names=["prompt", "concept"], **grouping),
            host.make("AspectBatchSorting", resolution_in_name="crop_resolution", names=names, batch_size=1),
            host.make("OutputPipelineModule", names=names),
        ]
        made = host.LoadingPipeline(
            device=torch.device("cpu"), modules=modules, batch_size=1, seed=1, state=host.PipelineState(2)
        )
        made.caches = caches
        return made

    def start(self, name: str, pipeline: Any) -> float:
        """Start an epoch, and return the seconds that the caches took."""
        seconds, start = [0.0], self.classes[name].start

        def timed(cache: Any, epoch: int) -> None:
            seconds[0] += seconds_of(lambda: start(cache, epoch))

        with patch.object(self.classes[name], "start", timed):
            pipeline.start_next_epoch()
        return seconds[0]

    def get_items(self, name: str) -> None:
        """Read image and text of each sample directly from the caches."""
        image, text = self.pipelines[name].caches
        for index in range(self.num_samples):
            image.get_item(index, "latent_image")
            text.get_item(index, "tokens_1")

    def epoch(self, name: str) -> None:
        """Start an epoch and read every item."""
        self.pipelines[name].start_next_epoch()
        num_items = sum(1 for _ in self.pipelines[name])
        assert num_items == self.num_samples, f"{name}: an epoch has {num_items} items"

    def warm_start(self, name: str) -> float:
        """Seconds that the caches take to start in a new pipeline, which opens the cache and plans."""
        return self.start(name, self.pipeline(name))


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    num_samples, scale = (6, 16) if options.tiny else (1000, 1)
    with contextlib.redirect_stderr(io.StringIO()):  # hides the progress bars
        bench = Bench(folder, num_samples, scale)
        names, rounds = list(bench.classes), options.repetitions
        for name in names:
            bench.epoch(name)
        items, epochs = (
            in_turns({name: partial(seconds_of, partial(method, name)) for name in names}, rounds, warm=warm)
            for method, warm in ((bench.get_items, True), (bench.epoch, False))
        )
        starts = in_turns({name: partial(bench.warm_start, name) for name in names}, rounds)
    fills = {name: [seconds] for name, seconds in bench.fill_s.items()}
    found = {"get_item": items, "epoch": epochs, "warm_start": starts, "fill": fills}
    per_sample = {
        what: {name: spread([each / num_samples for each in values]) for name, values in seconds.items()}
        for what, seconds in found.items()
    }
    result = {"num_samples": num_samples, "seconds_per_sample": per_sample, "wanted_speedup": WANTED_SPEEDUP}
    if "disk_cache" in names:
        speedup = {what: ratios(each["disk_cache"], each["latentcache"]) for what, each in found.items()}
        return result | {"speedup": speedup}
    return result


def main() -> int:
    torch.set_num_threads(1)
    parts = {"sdxl": run}
    return run_parts(parts, parse(make_parser(__doc__, parts)))


if __name__ == "__main__":
    sys.exit(main())
