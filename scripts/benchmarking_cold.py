"""The part of `bench_retrieve.py` in which the page cache is dropped before each pass."""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from benchmarking import in_turns, ratios, seconds_of
from benchmarking_samples import (
    KINDS,
    PEERS,
    Batches,
    Method,
    Rounds,
    Samples,
    as_rows,
    check,
    make_cache,
    make_peers,
    ours,
    stacked,
)
from page_cache import cached_pages, drop

from latentcache import LatentCache, LatentDataset, LatentLoader
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.loading.sampler import BucketBatchSampler
from latentcache.store import DiskStore
from latentcache.store.reader import PackReader

BATCH = 16
WAYS = {"batch": True, "batch_never": False}
"""Whether the system is advised what is read soon."""
OURS = ("batch", "loader")
LABELS = {
    "batch": "batch",
    "batch_never": "batch, never asks",
    "loader": "LatentLoader",
    "preadv": "preadv, default read-ahead",
} | PEERS
WANTED_COLD = {"times_faster_than_torch_load": 3}


def take_back(num_bytes: int) -> None:
    """Touch so many bytes of free memory, and free them again.

    Why: the host of a virtual machine takes free memory back after a while, and each page of it costs a fault when it
    is used again. On bare metal it does not go away.
    """
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for offset in range(0, num_bytes, mmap.PAGESIZE):
            memory[offset] = 1


def cached_share(paths: Sequence[Path]) -> float:
    """The share of the pages of some files that lie in the page cache."""
    return float(np.concatenate([cached_pages(path) for path in paths]).mean())


class Preadv:
    """The rows of the packs read with `preadv`, with the read-ahead that the system does by itself."""

    def __init__(self, path: Path, samples: Samples, batch_size: int):
        with (
            DiskStore(path, read_only=True) as store,
            LatentCache(store=store, manifests=ManifestFolder(path / "manifests")) as cache,
        ):
            rows = [cache.row(str(number))[1] for number in range(samples.num_samples)]
            keys = {"image": [row.images[0].key for row in rows], "text": [row.captions[0].key for row in rows]}
            found = {kind: list(store.look_up(names)) for kind, names in keys.items()}
            packs = {location.pack.id for places in found.values() for location in places if location is not None}
            self.files = {pack: os.open(store.directory.pack_path(pack), os.O_RDONLY) for pack in sorted(packs)}
        self.places: dict[str, list[tuple[int, int]]] = {name: [] for names in KINDS.values() for name in names}
        for location in [place for kind in KINDS for place in found[kind] if place is not None]:
            for column, (offset, _) in zip(location.group.columns, location.ranges(), strict=True):
                self.places[column.field].append((self.files[location.pack.id], offset))
        self.out = samples.out(batch_size)

    def read(self, batches: Batches) -> None:
        fields = [(as_rows(self.out[name]), places) for name, places in self.places.items()]
        for numbers in batches:
            for target, places in fields:
                for place, number in enumerate(numbers):
                    fd, offset = places[number]
                    assert os.preadv(fd, [target[place]], offset) == target.shape[1]

    def close(self) -> None:
        for fd in self.files.values():
            os.close(fd)


def cold(folder: Path, samples: Samples, options: argparse.Namespace) -> dict[str, Any]:
    path, size = folder / "cache", BATCH
    rounds = Rounds(samples.num_samples, options.num_read, options.repetitions)
    make_cache(path, samples)
    loads = make_peers(folder, samples, ["torch_load", "safetensors_file"], one_file=options.one_file)
    peer_files = {name: sorted((folder / name).iterdir()) for name in loads}
    packs = sorted((path / "packs").glob("*/*"))
    preadv = Preadv(path, samples, size)
    shares: list[float] = []
    num_touched = 2 * options.num_read * samples.row_bytes  # for the page cache, and for what peers make of it

    def timed(files: Sequence[Path], read: Method, number: int) -> float:
        drop(files)
        take_back(num_touched)
        shares.append(cached_share(files[:64]))
        return seconds_of(lambda: read(rounds.batches(number, size)))

    def opened(advises: bool) -> Callable[[int], float]:
        def run(number: int) -> float:
            drop(packs)  # before it is mapped
            with ExitStack() as patched, DiskStore(path) as store:
                if not advises:
                    patched.enter_context(patch.object(PackReader, "_advise", lambda *_: None))
                cache = LatentCache(store=store, manifests=ManifestFolder(path / "manifests"))
                cache.sample_ids()
                taken = timed(packs, ours(cache, samples), number)
                last = rounds.batches(number, size)[-1]
                check(samples, cache.batch([str(each) for each in last], device="cpu"), last)
            return taken

        return run

    def looked_ahead(number: int) -> float:
        drop(packs)
        with LatentLoader(BucketBatchSampler(LatentDataset(path), size, seed=number), device="cpu") as made:
            begun = []  # ended with the loader, which waits for its thread: it must not map packs any more

            def read(wanted: Batches) -> None:
                begun.append(batches := made.forever())
                for _ in wanted:
                    next(batches)

            return timed(packs, read, number)

    runs: dict[str, Callable[[int], float]] = {name: opened(advises) for name, advises in WAYS.items()}
    runs["loader"] = looked_ahead
    runs["preadv"] = lambda number: timed(packs, preadv.read, number)
    for name, load in loads.items():
        runs[name] = partial(timed, peer_files[name], stacked(load))
    numbers = {name: iter(range(options.repetitions)) for name in runs}
    methods = {name: lambda name=name: runs[name](next(numbers[name])) for name in runs}
    seconds = in_turns(methods, options.repetitions, clock=lambda method: method())
    preadv.close()
    ratio = {name: ratios(seconds[name], seconds["preadv"]) for name in runs if name != "preadv"}
    faster = {way: {name: ratios(seconds[name], seconds[way]) for name in loads} for way in OURS}
    return {
        "cold": {
            "ratio_to_preadv": {way: ratio[way]["median"] for way in OURS},
            "times_faster": {
                way: {name: values["median"] for name, values in found.items()} for way, found in faster.items()
            },
            "spread": {"ratio_to_preadv": ratio, "times_faster": faster},
            "us_per_sample": {name: statistics.median(v) / options.num_read * 1e6 for name, v in seconds.items()},
            "cached_before": {"median": statistics.median(shares), "max": max(shares)},
            "wanted": WANTED_COLD,
        }
    }


def cold_lines(result: Mapping[str, Any]) -> list[str]:
    ratio, faster = result["spread"]["ratio_to_preadv"], result["spread"]["times_faster"]
    lines = [f"{f'cold, B={BATCH}':34}{'us/sample':>10}{'x preadv':>10}{'x torch.load':>24}"]
    for name, value in result["us_per_sample"].items():
        against = 1.0 if name == "preadv" else ratio[name]["median"]
        found = faster.get(name, {}).get("torch_load")
        times = f"{found['median']:.1f} ({found['min']:.1f}..{found['max']:.1f})" if found else ""
        lines.append(f"{LABELS[name]:34}{value:10.1f}{against:10.2f}{times:>24}")
    wanted = result["wanted"]
    lines.append(f"wanted: {wanted['times_faster_than_torch_load']} x torch.load")
    lines.append(
        f"of the files' pages were in the page cache before a pass: {result['cached_before']['max']:.1%} at most"
    )
    return lines
