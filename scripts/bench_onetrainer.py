"""The cache in OneTrainer's pipeline against mgds' DiskCache: one sample, a whole warm epoch, and a warm start.

    python scripts/bench_onetrainer.py              # a table; a minute, 1 GB of disk
    python scripts/bench_onetrainer.py --json       # one document
    python scripts/bench_onetrainer.py --tiny       # for correctness only

Needs a clone of the project: the pipelines' host is that of the tests. Where mgds can be imported (installed, or its
`src` named in MGDS_SRC) both caches run in mgds' own pipeline. Elsewhere they run in the tests' host, and
DiskCache is replaced by a module that keeps two torch.save files for each sample, as it does, and reads them with
torch.load.

Samples are those of SDXL at 1024x1024 in float16, 450 KB each; encoders hand out values that they made before. All
files are in the page cache. The methods take turns in each round; figures are medians, with the least and the greatest.
An epoch is its start and the reading of all items one by one, through the sorting modules.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from benchmarking import in_turns, make_parser, parse, ratios, run_in_folder, spread

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
"""Digests of files that are younger than two seconds are not remembered."""
NUM_WARM_START = 1000

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
        """In place of an encoder: the values of the sample whose file or text has this content."""

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


def torch_load_cache(host: SimpleNamespace) -> type:  # noqa: C901 - a class with the methods that mgds asks for
    """What DiskCache does, for hosts without mgds: two files for each sample, and a list of aggregate values."""

    class TorchLoadCache(host.PipelineModule, host.SingleVariationRandomAccessPipelineModule):  # type: ignore[misc,name-defined]
        def __init__(self, cache_dir: str, split_names: list[str], aggregate_names: list[str], **_: Any):
            super().__init__()
            self.folder, self.split_names, self.aggregate_names = Path(cache_dir), split_names, aggregate_names

        def length(self) -> int:
            return int(self._get_previous_length(self.split_names[0]))

        def get_inputs(self) -> list[str]:
            return self.get_outputs()

        def get_outputs(self) -> list[str]:
            return self.split_names + self.aggregate_names

        def start(self, variation: int) -> None:
            aggregate = self.folder / "aggregate.pt"
            if not aggregate.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                for index in range(self.length()):
                    torch.save(self._values(self.split_names, index), self.folder / f"{index}.pt")
                torch.save([self._values(self.aggregate_names, i) for i in range(self.length())], aggregate)
            self.aggregate = torch.load(aggregate)

        def _values(self, names: Sequence[str], index: int) -> dict[str, Any]:
            return {name: self._get_previous_item(0, name, index) for name in names}

        def get_item(self, index: int, requested_name: str | None = None) -> Any:
            if requested_name in self.aggregate_names:
                return self.aggregate[index]
            return torch.load(self.folder / f"{index}.pt", map_location=self.pipeline.device)

    return TorchLoadCache


def hosts() -> tuple[SimpleNamespace, type, str]:
    """The host of pipelines, the class to compare with, and what these are."""
    sys.path.insert(0, str(TESTS))
    pipeline_host = importlib.import_module("helpers.pipeline_host")
    source = os.environ.get("MGDS_SRC")
    if source:
        sys.path.append(source)
    if importlib.util.find_spec("mgds") is None:
        own = pipeline_host.host("own")
        return own, torch_load_cache(own), "two torch.load of files of its own, in the tests' host"
    disk_cache = importlib.import_module("mgds.pipelineModules.DiskCache").DiskCache
    return pipeline_host.host("mgds"), disk_cache, "mgds' DiskCache, in mgds"


class Bench:
    """One pipeline for each cache over the same folder, each warm."""

    def __init__(self, folder: Path, num_samples: int, scale: int):
        self.folder, self.num_samples, self.scale = folder, num_samples, scale
        self.host, self.disk_cache, self.compared_with = hosts()
        photos = folder / "photos"
        photos.mkdir()
        for number in range(num_samples):
            (photos / f"{number:06}.png").write_bytes(f"file {number}".encode() * 100)
            (photos / f"{number:06}.txt").write_text(str(number), encoding="utf-8")
        self.classes = {"latentcache": self.host.LatentCacheModule, "disk_cache": self.disk_cache}
        self.encoder = encoder_class(self.host)
        time.sleep(SETTLED_S)
        self.pipelines = {name: self.pipeline(name) for name in self.classes}
        for pipeline in self.pipelines.values():
            pipeline.start_next_epoch()  # cold: everything is made
            self.read(pipeline)

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
        with contextlib.redirect_stderr(io.StringIO()):  # a bar for each start
            made = host.LoadingPipeline(
                device=torch.device("cpu"), modules=modules, batch_size=1, seed=1, state=host.PipelineState(2)
            )
        made.caches = caches
        return made

    def read(self, pipeline: Any) -> int:
        """Every item of the epoch; their number."""
        return sum(1 for _ in pipeline)

    def get_items(self, name: str) -> Callable[[], None]:
        """Image and text of each sample, straight from the caches."""
        caches = self.pipelines[name].caches

        def get() -> None:
            for index in range(self.num_samples):
                caches[0].get_item(index, "latent_image")
                caches[1].get_item(index, "tokens_1")

        return get

    def epoch(self, name: str) -> Callable[[], None]:
        def run() -> None:
            pipeline = self.pipelines[name]
            pipeline.start_next_epoch()
            if self.read(pipeline) != self.num_samples:
                raise RuntimeError(f"{name}: an epoch has not {self.num_samples} items")

        return run

    def warm_starts(self, repetitions: int) -> Iterator[tuple[float, float]]:
        """Seconds of both caches' start in a new pipeline, which opens the cache and plans; and of the next epoch's."""
        for _ in range(repetitions):
            pipeline = self.pipeline("latentcache")
            yield self._start_s(pipeline), self._start_s(pipeline)

    def _start_s(self, pipeline: Any) -> float:
        seconds = [0.0]
        for cache in pipeline.caches:
            start = type(cache).start

            def timed(epoch: int, cache: Any = cache, start: Any = start) -> None:
                begin = time.perf_counter()
                start(cache, epoch)
                seconds[0] += time.perf_counter() - begin

            cache.start = timed
        with contextlib.redirect_stderr(io.StringIO()):
            pipeline.start_next_epoch()
        for cache in pipeline.caches:
            del cache.start
        return seconds[0]


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    num_samples, scale = (6, 16) if options.tiny else (1000, 1)
    bench = Bench(folder, num_samples, scale)
    items = in_turns({n: bench.get_items(n) for n in bench.classes}, options.repetitions, warm=True)
    epochs = in_turns({n: bench.epoch(n) for n in bench.classes}, options.repetitions)
    starts = list(bench.warm_starts(options.repetitions))
    return {
        "compared_with": bench.compared_with,
        "num_samples": num_samples,
        "get_item": figures(items, num_samples),
        "epoch": figures(epochs, num_samples),
        "warm_start_s": {
            "first": spread([first for first, _ in starts]),
            "next_epoch": spread([later for _, later in starts]),
            "per_1000_items": statistics.median(first for first, _ in starts) / num_samples * NUM_WARM_START,
        },
    }


def figures(seconds: Mapping[str, Sequence[float]], num_samples: int) -> dict[str, Any]:
    """Seconds for each sample, and how many times as long the other takes."""
    per_sample = {name: spread([value / num_samples for value in values]) for name, values in seconds.items()}
    return {"seconds_per_sample": per_sample, "speedup": ratios(seconds["disk_cache"], seconds["latentcache"])}


def main() -> None:
    torch.set_num_threads(1)
    run_in_folder(run, parse(make_parser(__doc__)))


if __name__ == "__main__":
    main()
