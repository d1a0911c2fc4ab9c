"""Open, read, close, again and again: descriptors, threads, maps, temporary files and memory stay as they were.

A cycle opens a cache, reads a batch, a prompt's worth of entries and a record, and closes it; the ways take turns: the
public cache, a read-only one, the store past the page cache, the loader, an abandoned one that only the collector
ends. Figures are taken after a tenth of the cycles and at the end, after a full collection.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import soaking

from latentcache import BucketBatchSampler, DiskStore, LatentCache, LatentDataset, LatentLoader

NUM_SAMPLES = 24
NUMBERS = range(0, 5 * NUM_SAMPLES, 5)
"""Of samples whose captions have equal lengths."""
MAX_GROWTH = 0.01
"""Of the memory, from a tenth of the cycles to the end. Everything else stays exactly as it was."""
SLACK_BYTES = 4 << 20
"""Of memory: what an allocator keeps back varies by some MiB whatever the program does."""


def figures(cache: Path) -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    return {
        "num_descriptors": process.num_fds(),
        "num_threads": process.num_threads(),
        "num_python_threads": threading.active_count(),
        "num_maps_of_packs": sum(".safetensors" in part.path for part in process.memory_maps(grouped=False)),
        "num_files": sum(len(files) for _, _, files in os.walk(cache)),
        "num_temporary_files": len(os.listdir(tempfile.gettempdir())),
        "memory_bytes": process.memory_info().rss,
    }


def read_cache(path: Path, keys: list[str]) -> None:
    with LatentCache(path) as cache:
        cache.batch(cache.sample_ids()[:4], device="cpu")
        cache.get(keys[0])


def read_only(path: Path, keys: list[str]) -> None:
    with LatentCache(path, read_only=True) as cache:
        cache.batch(cache.sample_ids()[4:8], device="cpu")
        cache.store.record(keys[1])


def read_with_loader(path: Path, keys: list[str]) -> None:
    dataset = LatentDataset(path, "train")
    sampler = BucketBatchSampler(dataset, 4, seed=0)
    for _ in LatentLoader(sampler, device="cpu"):
        pass
    dataset.cache.close()


def abandon(path: Path, keys: list[str]) -> None:
    cache = LatentCache(path)
    cache.batch(cache.sample_ids()[:2], device="cpu")


def program(soak: soaking.Soak) -> None:
    path = soak.folder / "cache"
    (soak.folder / "temporary").mkdir()
    tempfile.tempdir = str(soak.folder / "temporary")  # other programs write to the system's
    with DiskStore(path) as store:
        for first in range(0, NUM_SAMPLES, 6):
            store.add(soaking.sample_entries(NUMBERS[first : first + 6]))
        keys = list(store.keys())
    soaking.write_manifest(path, "train", NUMBERS)
    ways: list[Callable[[Path, list[str]], None]] = [
        read_cache, read_only, read_with_loader, abandon,
    ]  # fmt: skip
    goal = soak.goal("open, read, close: descriptors, threads, maps, files and memory stay flat")
    before: dict[str, int] = {}
    for number in range(soak.n):
        if number == max(soak.n // 10, min(soak.n - 1, 5 * len(ways))):
            before = figures(path)
        with goal.case(f"cycle {number}"):
            ways[number % len(ways)](path, keys)
    after = figures(path)
    goal.figures |= {name: f"{before[name]:,} -> {after[name]:,}" for name in after}
    for name, value in after.items():
        allowed = before[name]
        if name == "memory_bytes":
            allowed += max(SLACK_BYTES, int(MAX_GROWTH * allowed))
        if value > allowed:
            goal.fail(f"{name} grew from {before[name]:,} to {value:,}; at most {allowed:,} are allowed")


def main() -> int:
    return soaking.run_soak(program, soaking.make_parser(__doc__, 10_000, "cycles"))


if __name__ == "__main__":
    sys.exit(main())
