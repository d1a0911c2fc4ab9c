"""The part of `bench_retrieve.py` in which the page cache is dropped before each pass."""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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

from latentcache import LatentCache, LatentDataset, LatentLoader
from latentcache.dataset.manifest import ManifestFolder
from latentcache.retrieve.sampler import BucketBatchSampler
from latentcache.store import DiskStore

BATCH = 16
ASK_AHEAD = ("missing", "always", "never")
WANTED_COLD = {"ratio_to_preadv": 0.7, "times_faster_than_torch_load": 4}


def drop(paths: Sequence[Path]) -> None:
    """Drop files from the page cache. They must not be mapped."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def take_back(num_bytes: int) -> None:
    """Touch so many bytes of free memory, and free them again.

    Why: the host of a virtual machine takes free memory back after a while, and each page of it costs a fault when it
    is used again. On bare metal it does not go away.
    """
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for offset in range(0, num_bytes, mmap.PAGESIZE):
            memory[offset] = 1


def cached_share(paths: Sequence[Path]) -> float:
    """The share of some pages, one per MiB, that a read finds in the page cache."""
    found: list[bool] = []
    page = bytearray(mmap.PAGESIZE)
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            for offset in range(0, os.fstat(fd).st_size, 1 << 20):
                try:
                    found.append(os.preadv(fd, [page], offset, os.RWF_NOWAIT) > 0)
                except BlockingIOError:
                    found.append(False)
        finally:
            os.close(fd)
    return sum(found) / len(found)


class Preadv:
    """The rows of the packs read with `preadv`, with the read-ahead that the system does by itself."""

    def __init__(self, path: Path, samples: Samples, batch_size: int):
        with (
            DiskStore(path, read_only=True) as store,
            LatentCache(store=store, manifests=ManifestFolder(path / "manifests")) as cache,
        ):
            rows = [cache.row(str(number))[1] for number in range(samples.num_samples)]
            keys = {"image": [row.images[0].key for row in rows], "text": [row.captions[0].key for row in rows]}
            found = {kind: list(store.resolve(names).locations) for kind, names in keys.items()}
            packs = {location.pack for places in found.values() for location in places}
            self.files = {pack: os.open(store.directory.pack_path(pack), os.O_RDONLY) for pack in sorted(packs)}
        self.places = {
            name: [(self.files[location.pack], location.places[name].offset) for location in found[kind]]
            for kind, names in KINDS.items()
            for name in names
        }
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

    def opened(mode: str) -> Callable[[int], float]:
        def run(number: int) -> float:
            drop(packs)  # before it is mapped
            with DiskStore(path, ask_ahead=mode) as store:  # type: ignore[arg-type]
                cache = LatentCache(store=store, manifests=ManifestFolder(path / "manifests"))
                cache.sample_ids()
                out = samples.out(size)
                taken = timed(packs, ours(cache, samples, out), number)
                check(samples, out, rounds.batches(number, size)[-1])
            return taken

        return run

    def looked_ahead(number: int) -> float:
        drop(packs)
        dataset = LatentDataset(path)
        with LatentLoader(BucketBatchSampler(dataset, size, seed=number), device="cpu") as made:

            def read(wanted: Batches) -> None:
                batches = made.forever()
                for _ in wanted:
                    next(batches)

            return timed(packs, read, number)

    runs: dict[str, Callable[[int], float]] = {f"ours_{mode}": opened(mode) for mode in ASK_AHEAD}
    runs["preadv"] = lambda number: timed(packs, preadv.read, number)
    runs["loader"] = looked_ahead
    for name, load in loads.items():
        runs[name] = lambda number, name=name, load=load: timed(peer_files[name], stacked(load), number)
    numbers = {name: iter(range(options.repetitions)) for name in runs}
    methods = {name: lambda name=name: runs[name](next(numbers[name])) for name in runs}
    seconds = in_turns(methods, options.repetitions, clock=lambda method: method())
    preadv.close()
    ratio = {name: ratios(seconds[name], seconds["preadv"]) for name in runs if name != "preadv"}
    faster, loader_faster = (
        {name: ratios(seconds[name], seconds[way])["median"] for name in loads} for way in ("ours_missing", "loader")
    )
    return {
        "cold": {
            "ratio_to_preadv": ratio["ours_missing"]["median"],
            "times_faster": faster,
            "times_faster_loader": loader_faster,
            "ratios_to_preadv": ratio,
            "us_per_sample": {name: statistics.median(v) / options.num_read * 1e6 for name, v in seconds.items()},
            "cached_before": {"median": statistics.median(shares), "max": max(shares)},
            "wanted": WANTED_COLD,
        }
    }


def cold_lines(result: Mapping[str, Any]) -> list[str]:
    labels = {f"ours_{mode}": f"batch, ask ahead: {mode}" for mode in ASK_AHEAD}
    labels |= {"loader": "LatentLoader", "preadv": "preadv, default read-ahead"}
    lines = [f"{f'cold, B={BATCH}':32}{'us/sample':>10}{'x preadv':>10}"]
    for name, value in result["us_per_sample"].items():
        ratio = 1.0 if name == "preadv" else result["ratios_to_preadv"][name]["median"]
        lines.append(f"{labels.get(name) or PEERS[name]:32}{value:10.1f}{ratio:10.2f}")
    wanted = result["wanted"]
    lines.append(f"wanted: {wanted['ratio_to_preadv']} x preadv; here {result['ratio_to_preadv']:.2f}")
    faster, loader = (result[name]["torch_load"] for name in ("times_faster", "times_faster_loader"))
    lines.append(
        f"wanted: {wanted['times_faster_than_torch_load']} times faster than torch.load; here {faster:.1f}, "
        f"with LatentLoader {loader:.1f}"
    )
    lines.append(
        f"of the files' pages were in the page cache before a pass: {result['cached_before']['max']:.1%} at most"
    )
    return lines
