"""The cases of bench_precache.py: a real run of precache, and the ceilings that it is measured against."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import benchmarking
import numpy as np
import torch
from encoder_variants import peak_memory, synchronize

from latentcache import Config, Report, run_precache
from latentcache.config import BucketsConfig, ImagesConfig
from latentcache.config_file import parse_config
from latentcache.dataset.buckets import assign, bucket_table, fit
from latentcache.dataset.images import decode, prepare
from latentcache.devices.placement import device_named, placed
from latentcache.identity import digest
from latentcache.models.model_loader import LoadedModels
from latentcache.models.running import vae_settings
from latentcache.models.vae import DTYPES, encode_images
from latentcache.precache.encodings import choose_encodings
from latentcache.precache.tasks import TEXT_BATCH_SIZE
from latentcache.precache.workspace import open_workspace
from latentcache.types import Size


class Case:
    """A dataset, models, and runs of precache over them, each into a cache of its own."""

    def __init__(self, folder: Path, models: LoadedModels, side: int, options: argparse.Namespace):
        self.folder, self.models, self.options, self.side = folder, models, options, side
        self.reports: list[Report] = []
        self._numbers = itertools.count()

    def config(self) -> Config:
        dataset = {
            "name": "bench",
            "source": {"kind": "folder", "path": self.folder / "photos"},
            "buckets": {"area": self.side**2, "step": 8, "max_aspect": 1.0},
            "images": {"min_side": 8},
        }
        encode = {
            "device": self.options.device,
            "vae_dtype": self.options.dtype,
            "text_dtype": self.options.dtype,
            "store_dtype": "float16",
            "image_output": "mean",
        }
        path = self.folder / f"cache-{next(self._numbers)}"
        return parse_config({"cache": {"path": path}, "datasets": [dataset], "encode": encode})

    def run(self) -> float:
        """Seconds of a whole run into a new cache that is open already, without loading the models."""
        config = self.config()
        with open_workspace(config.cache) as workspace:
            report = run_precache(config, models=self.models, workspace=workspace)
        if report.refused or report.num_encoded != report.num_misses:
            raise RuntimeError(f"the run is no measure: {report.to_text()}")
        self.reports.append(report)
        shutil.rmtree(config.cache.path)
        return report.seconds["total"] - report.seconds["load"]

    def stages(self) -> dict[str, float]:
        """Median seconds of the stages of a run."""
        names = self.reports[0].seconds
        return {name: benchmarking.spread([r.seconds[name] for r in self.reports])["median"] for name in names}

    def read(self, path: Path) -> np.ndarray:
        """What a decoding thread does."""
        data = path.read_bytes()
        digest(data)
        pixels = decode(data, str(path), ImagesConfig(min_side=8))
        size = Size(*pixels.shape[:2])
        table = bucket_table(BucketsConfig(area=self.side**2, step=8, max_aspect=1.0))
        return prepare(pixels, fit(size, assign(size, table)))


def chunks(items: Sequence[Any], *sizes: int) -> Iterator[Sequence[Any]]:
    """The items in groups, and the groups in batches, as a plan forms them."""
    if not sizes:
        yield items
        return
    for start in range(0, len(items), sizes[0]):
        yield from chunks(items[start : start + sizes[0]], *sizes[1:])


def encoder_alone(case: Case, batches: Sequence[torch.Tensor], device: torch.device) -> float:
    """Seconds of the VAE over uint8 batches that lie on the device."""
    vae = case.models.vae(DTYPES[case.options.dtype])
    with placed(vae, device), vae_settings(vae):
        encode_images(vae, batches[0])
        synchronize(device)
        start = time.perf_counter()
        for batch in batches:
            encode_images(vae, batch)
        synchronize(device)
        return time.perf_counter() - start


def decoders_alone(case: Case, paths: Sequence[Path]) -> float:
    """Seconds in which all cores read and decode the files."""
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        start = time.perf_counter()
        for future in [executor.submit(case.read, path) for path in paths]:
            future.result()
        return time.perf_counter() - start


def one_at_a_time(case: Case, paths: Sequence[Path], device: torch.device) -> float:
    """Seconds of the usual loop: read an image, encode it, fetch the result, save it, take the next."""
    folder = case.folder / "one-at-a-time"
    folder.mkdir()
    vae = case.models.vae(DTYPES[case.options.dtype])
    with placed(vae, device):
        start = time.perf_counter()
        for path in paths:
            moments = encode_images(vae, case.read(path)[None])
            torch.save(moments[0, :4].half().cpu(), folder / f"{path.stem}.pt")
        seconds = time.perf_counter() - start
    shutil.rmtree(folder)
    return seconds


def images_case(case: Case, paths: Sequence[Path]) -> dict[str, Any]:
    """`run` against the encoder, the decoders and, at full size, the usual loop, all over these images."""
    options = case.options
    device = device_named(options.device)
    encodings = choose_encodings(case.config(), case.models, {})
    pixels = [torch.from_numpy(case.read(path)) for path in paths]
    parts = chunks(pixels, encodings.image_group_size, encodings.vae.batch_size)
    batches = [torch.stack(list(batch)).to(device) for batch in parts]
    methods: dict[str, Callable[[], float]] = {
        "run": case.run,
        "encoder": lambda: encoder_alone(case, batches, device),
        "decode": lambda: decoders_alone(case, paths),
    }
    if options.full_size:
        methods["one_at_a_time"] = lambda: one_at_a_time(case, paths, device)
    case.run()  # the first one imports, allocates and compiles
    case.reports.clear()
    seconds = benchmarking.in_turns(methods, options.repetitions, clock=lambda method: method())
    batches.clear()  # they are no part of the run's memory
    with peak_memory(device) as peak:
        case.run()
    slower = [max(pair) for pair in zip(seconds["encoder"], seconds["decode"], strict=True)]
    return {
        "num_images": len(paths),
        "batch_size": encodings.vae.batch_size,
        "images_per_s": {name: len(paths) / benchmarking.spread(values)["median"] for name, values in seconds.items()},
        "fraction_of_encoder": benchmarking.ratios(seconds["encoder"], seconds["run"]),
        "fraction_of_decoders": benchmarking.ratios(seconds["decode"], seconds["run"]),
        "fraction_of_slower": benchmarking.ratios(slower, seconds["run"]),
        "decode_share": benchmarking.ratios(seconds["decode"], seconds["encoder"]),
        "stages_s": case.stages(),
        "peak_memory_bytes": peak.num_bytes,
        "times_one_at_a_time": benchmarking.ratios(seconds["one_at_a_time"], seconds["run"])
        if "one_at_a_time" in seconds
        else None,
    }


def captions_alone(case: Case, batches: Sequence[Sequence[torch.Tensor]], device: torch.device) -> float:
    """Seconds of both text encoders over tokens that lie on the device."""
    encoders = [*case.models.text_encoders(DTYPES[case.options.dtype]).values()]
    with (
        placed(encoders[0], device),
        placed(encoders[1], device),
        torch.no_grad(),
    ):

        def encode(batch: Sequence[torch.Tensor]) -> None:
            made = [encoder(ids, output_hidden_states=True) for encoder, ids in zip(encoders, batch, strict=True)]
            torch.cat([output.hidden_states[-2] for output in made], -1)

        encode(batches[0])
        synchronize(device)
        start = time.perf_counter()
        for batch in batches:
            encode(batch)
        synchronize(device)
        return time.perf_counter() - start


def captions_case(case: Case, captions: Sequence[str]) -> dict[str, Any]:
    """`run` over these captions (and one small image) against the text encoders alone.

    The run encodes the empty caption too, so it is one of them here.
    """
    captions = ["", *captions]
    device = device_named(case.options.device)
    parts = case.models.text(DTYPES[case.options.dtype])
    batch_size = choose_encodings(case.config(), case.models, {}).text_encoders.batch_size
    batches = []
    for batch in chunks(captions, TEXT_BATCH_SIZE, batch_size):
        ids = [tokens.input_ids for tokens in case.models.family.tokenize(parts, batch)]
        batches.append(tuple(torch.cat(column).to(device) for column in zip(*ids, strict=True)))
    methods = {"run": case.run, "encoder": lambda: captions_alone(case, batches, device)}
    case.run()
    case.reports.clear()
    seconds = benchmarking.in_turns(methods, case.options.repetitions, clock=lambda method: method())
    batches.clear()  # they are no part of the run's memory
    with peak_memory(device) as peak:
        case.run()
    return {
        "num_captions": len(captions),
        "batch_size": batch_size,
        "captions_per_s": {
            name: len(captions) / benchmarking.spread(values)["median"] for name, values in seconds.items()
        },
        "fraction_of_encoder": benchmarking.ratios(seconds["encoder"], seconds["run"]),
        "stages_s": case.stages(),
        "peak_memory_bytes": peak.num_bytes,
    }
