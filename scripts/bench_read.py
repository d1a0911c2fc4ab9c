"""Read latency of a batch, against a memcpy, trainers' file formats, the raw disk and a training step.

    python scripts/bench_read.py                   # all parts; minutes, 15 GB of disk, as much of page cache
    python scripts/bench_read.py --part warm       # one part

Samples have the size of 1024x1024: mean latents, prompt_embeds and pooled_prompt_embeds in float16, 438.5 KiB. They are
read in random order, and values are checked. Peers keep one file of latents and one of text embeddings per sample, as
kohya's sd-scripts, SimpleTuner, ai-toolkit and OneTrainer do.

warm   every timed pass directly follows an untimed one. The limit copies the same rows in the same order, in one
       thread, from anonymous memory into existing tensors. Passes at memory speed take only 20 ms, which a virtual
       machine often disturbs, so they get five times as many rounds
cold   before each pass the files are dropped from the page cache, free memory is touched (see `take_back`) and the
       cache is reopened, so digests are verified too. Also a whole epoch in pack order, against `cat` of the packs to
       /dev/null
wait   time in `next` on a loader as a share of a step of 40 ms, which sleeps as the host does while an accelerator
       works: from dropped files, and in the following epoch. The first batch does not count

The host of a virtual machine may still cache dropped files, so trust the ratios rather than the times.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import diskcache
import numpy as np
import safetensors.torch
import torch
from benchmarking import (
    SHAPES,
    TINY_SHAPES,
    Tensors,
    in_turns,
    make_parser,
    ratios,
    run_parts,
    seconds_of,
    spread,
    write_cache,
)

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader

BATCH = 16
NUM_REPEATED = 256
"""Distinct values in the cold parts; bounds the memory that they need."""
ROUNDS_AT_PACE = 5
"""Factor on the number of rounds of methods that run at memory speed."""
Batches = Sequence[Sequence[int]]
Method = Callable[[Batches], None]
Save = Callable[[Any, Path], Any]
Load = Callable[[Path], Tensors]


class Samples:
    """The values: a tensor [n, *shape] per field. Sample `number` has row `number % n`."""

    def __init__(self, options: argparse.Namespace, num_values: int):
        self.num_samples = options.num_samples
        self.shapes = TINY_SHAPES if options.tiny else SHAPES
        generator = torch.Generator().manual_seed(0)
        self.fields = {
            name: torch.empty((num_values, *shape), dtype=torch.float16).normal_(generator=generator)
            for shapes in self.shapes.values()
            for name, shape in shapes.items()
        }
        self.row_bytes = sum(field[0].nbytes for field in self.fields.values())

    def values(self, number: int) -> dict[str, dict[str, torch.Tensor]]:
        """Tensors by kind. They are copies, because saving a view would save its whole base."""
        row = number % len(next(iter(self.fields.values())))
        return {kind: {name: self.fields[name][row].clone() for name in names} for kind, names in self.shapes.items()}

    def write(self, path: Path) -> list[Path]:
        """Write a cache of all samples. Returns its packs."""
        write_cache(path, self.num_samples, self.values)
        return sorted((path / "packs").glob("*/*"))

    def check(self, batch: Mapping[str, Any]) -> None:
        """AssertionError if the batch has wrong values."""
        for name, field in self.fields.items():
            assert torch.equal(batch[name], field[[int(each) % len(field) for each in batch["sample_id"]]]), name


def batches_of(options: argparse.Namespace, seed: int, batch_size: int = BATCH) -> Batches:
    """Batches of random samples without repetition."""
    order = random.Random(seed).sample(range(options.num_samples), options.num_read)
    return [order[at : at + batch_size] for at in range(0, len(order), batch_size)]


def limit(samples: Samples, batch_size: int) -> Method:
    sources = [field.view(torch.uint8).flatten(1).numpy() for field in samples.fields.values()]
    # np.zeros allocates lazily; the untimed pass touches the pages.
    fields = [(np.zeros((batch_size, rows.shape[1]), np.uint8), list(rows)) for rows in sources]

    def read(batches: Batches) -> None:
        for numbers in batches:
            for target, rows in fields:
                for place, number in enumerate(numbers):
                    target[place] = rows[number]

    return read


def ours(cache: LatentCache) -> Method:
    def read(batches: Batches) -> None:
        for numbers in batches:
            cache.batch([str(number) for number in numbers], device="cpu")

    return read


def loader(dataset: LatentDataset, batch_size: int, check: Callable[[Mapping[str, Any]], None]) -> Method:
    """Batches in the sampler's order, without read-ahead. An epoch is checked first."""
    made = LatentLoader(BucketBatchSampler(dataset, batch_size, drop_last=True), device="cpu", prefetch=0)
    for batch in made:
        check(batch)
    batches = made.forever()

    def read(wanted: Batches) -> None:
        for _ in wanted:
            next(batches)

    return read


# Peers ----------------------------------------------------------------------------------------------------------------


def save_npz(tensors: Tensors, path: Path) -> None:
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
    with path.open("wb") as file:
        np.savez(file, **arrays)


def load_npz(path: Path) -> Tensors:
    with np.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def pickling_diskcache(folder: Path) -> tuple[Save, Load]:
    """A diskcache with its default pickling, but without its default limit of 1 GiB."""
    cache = diskcache.Cache(str(folder), size_limit=1 << 50, cull_limit=0)
    return lambda tensors, path: cache.set(path.name, tensors), lambda path: cache[path.name]


PEERS: dict[str, Callable[[Path], tuple[Save, Load]]] = {
    "torch_load": lambda folder: (torch.save, torch.load),
    "npz": lambda folder: (save_npz, load_npz),
    "safetensors_file": lambda folder: (safetensors.torch.save_file, safetensors.torch.load_file),
    "diskcache_pickle": pickling_diskcache,
}


def make_peer(folder: Path, samples: Samples, name: str) -> Method:
    """Save the samples as a peer does: one file (or value) of latents and one of text embeddings each."""
    folder.mkdir()
    save, load = PEERS[name](folder)
    places = [[folder / f"{number}.{kind}" for kind in samples.shapes] for number in range(samples.num_samples)]
    for number, row in enumerate(places):
        for values, place in zip(samples.values(number).values(), row, strict=True):
            save(values, place)

    def read(batches: Batches) -> None:
        for numbers in batches:
            loaded = [{name: value for at in places[number] for name, value in load(at).items()} for number in numbers]
            for field in loaded[0]:
                torch.stack([tensors[field] for tensors in loaded])

    return read


# Warm -----------------------------------------------------------------------------------------------------------------


def warm(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    samples = Samples(options, options.num_samples)
    samples.write(folder / "cache")
    peers = {name: make_peer(folder / name, samples, name) for name in PEERS}
    by_size: dict[str, Any] = {}

    def in_rounds(ways: Mapping[str, Method], num_rounds: int, size: int = BATCH) -> dict[str, list[float]]:
        batches = batches_of(options, 0, size)
        methods = {name: partial(seconds_of, partial(read, batches)) for name, read in ways.items()}
        return in_turns(methods, num_rounds, warm=True)

    dataset = LatentDataset(folder / "cache")
    cache = dataset.cache
    for size in (4, 16) if options.tiny else (4, 16, 64):
        num_rounds = options.repetitions * (1 if options.tiny else ROUNDS_AT_PACE)
        ways = {"limit": limit(samples, size), "batch": ours(cache), "loader": loader(dataset, size, samples.check)}
        seconds = in_rounds(ways, num_rounds, size)
        over = {f"{name}_over_limit": ratios(seconds[name], seconds["limit"]) for name in ("batch", "loader")}
        by_size[str(size)] = over | {"us_per_sample": us_per_sample(seconds, options.num_read)}
    ways = {"limit": limit(samples, BATCH), "ours": ours(cache)}
    seconds = in_rounds(ways | peers, options.repetitions)
    cache.close()
    return {
        "sample_bytes": samples.row_bytes,
        "batch_size": by_size,
        "times_faster": {name: ratios(seconds[name], seconds["ours"]) for name in PEERS},
        "times_faster_limit": {name: ratios(seconds[name], seconds["limit"]) for name in PEERS},
        "us_per_sample": us_per_sample(seconds, options.num_read),
        "wanted_ratio": {"4": 2.0, "16": 1.35, "64": 1.25},
        "wanted_times_faster": {"torch_load": 15, "npz": 15, "safetensors_file": 5, "diskcache_pickle": 10},
    }


def us_per_sample(seconds: Mapping[str, Sequence[float]], num_read: int) -> dict[str, float]:
    return {name: statistics.median(values) / num_read * 1e6 for name, values in seconds.items()}


# Cold -----------------------------------------------------------------------------------------------------------------


def drop(paths: Iterable[Path]) -> None:
    """Drop files from the page cache. They must not be mapped."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def take_back(num_bytes: int) -> None:
    """Touch `num_bytes` of free memory and free it again.

    The host of a virtual machine reclaims free memory after a while, and using such a page again costs a fault in the
    host. Bare metal has no such cost.
    """
    np.ones(num_bytes, np.uint8)


class Cold:
    """Methods of reading a cache after dropping its files. Each returns the seconds of a pass."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        self.path, self.options = folder / "cache", options
        self.samples = Samples(options, min(NUM_REPEATED, options.num_samples))
        self.packs = self.samples.write(self.path)

    def timed(self, files: Sequence[Path], read: Callable[[], Any]) -> float:
        drop(files)
        take_back(2 * self.options.num_read * self.samples.row_bytes)  # for the page cache and the batches
        return seconds_of(read)

    def batch(self, number: int) -> float:
        drop(self.packs)  # before they are mapped
        with LatentCache(self.path) as cache:
            cache.sample_ids()
            batches = batches_of(self.options, number)
            taken = self.timed(self.packs, lambda: ours(cache)(batches))
            self.samples.check(cache.batch([str(each) for each in batches[-1]], device="cpu"))
        return taken

    def loader(self, number: int, num_read: int, order: Any = "random") -> float:
        drop(self.packs)
        dataset = LatentDataset(self.path, order=order)
        sampler = BucketBatchSampler(dataset, BATCH, seed=number, window=self.options.window)
        last: dict[str, Any] = {}
        with LatentLoader(sampler, device="cpu") as made:

            def read() -> None:
                for at, batch in enumerate(made, 1):
                    last.update(batch)
                    if at * BATCH >= num_read:
                        break

            taken = self.timed(self.packs, read)
        self.samples.check(last)
        dataset.cache.close()
        return taken

    def cat(self, number: int) -> float:
        command = ["cat", *map(str, self.packs)]
        return self.timed(self.packs, lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True))

    def measure(self, runs: Mapping[str, Callable[[int], float]]) -> dict[str, list[float]]:
        """Seconds of each method in each round. Methods are called with the round's number."""
        numbers = {name: iter(range(self.options.repetitions)) for name in runs}
        methods = {name: lambda name=name: runs[name](next(numbers[name])) for name in runs}
        return in_turns(methods, self.options.repetitions)


def cold(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    ways = Cold(folder, options)
    peer = make_peer(folder / "peer", ways.samples, "torch_load")
    files = sorted((folder / "peer").iterdir())
    seconds = ways.measure(
        {
            "batch": ways.batch,
            "loader": partial(ways.loader, num_read=options.num_read),
            "torch_load": lambda number: ways.timed(files, partial(peer, batches_of(options, number))),
        }
    )
    num_samples = options.num_samples
    whole = ways.measure({"cat": ways.cat, "packs": partial(ways.loader, num_read=num_samples, order="packs")})
    # cat also reads keys and records, so its time is scaled to the payload.
    payload = ways.samples.row_bytes * num_samples / sum(path.stat().st_size for path in ways.packs)
    return {
        "times_faster_than_torch_load": {
            way: ratios(seconds["torch_load"], seconds[way]) for way in ("batch", "loader")
        },
        "packs_of_cat": ratios([each * payload for each in whole["cat"]], whole["packs"]),
        "us_per_sample": us_per_sample(seconds, options.num_read) | us_per_sample(whole, num_samples),
        "wanted": {"times_faster_than_torch_load": 3, "packs_of_cat": 0.6},
    }


# Beside a step --------------------------------------------------------------------------------------------------------


def wait(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The share of a training step spent waiting, in an epoch from the disk and in one from memory."""
    ways, step_s = Cold(folder, options), 0.002 if options.tiny else 0.04
    means: dict[str, list[float]] = {"cold": [], "warm": []}
    waits: dict[str, list[float]] = {"cold": [], "warm": []}
    for seed in range(options.repetitions):
        drop(ways.packs)
        sampler = BucketBatchSampler(LatentDataset(ways.path), BATCH, seed=seed)
        with LatentLoader(sampler, device="cpu") as made:
            for name in means:
                batches = iter(made)  # the same epoch again
                next(batches)
                taken = []
                for _ in range(options.num_read // BATCH - 1):
                    time.sleep(step_s)
                    taken.append(seconds_of(partial(next, batches)))
                means[name].append(statistics.mean(taken) / step_s)
                waits[name] += taken
                batches.close()
        made.dataset.cache.close()
    return {
        "step_s": step_s,
        "share": {name: spread(values) for name, values in means.items()},
        "share_p99": {name: float(np.quantile(values, 0.99)) / step_s for name, values in waits.items()},
        "wanted_share": 0.01,
    }


PARTS = {"warm": warm, "cold": cold, "wait": wait}


def main() -> int:
    parser = make_parser(__doc__, PARTS)
    parser.add_argument("--num_samples", type=int, default=4000)
    parser.add_argument("--window", type=int, default=4, help="packs mixed by pack order (default: %(default)s)")
    options = parser.parse_args()
    options.num_read = 1024
    if options.tiny:
        options.num_samples, options.num_read = 96, 32
    torch.set_num_threads(1)  # as the limit's copy
    return run_parts(PARTS, options)


if __name__ == "__main__":
    sys.exit(main())
