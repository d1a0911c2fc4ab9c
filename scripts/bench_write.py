"""How fast entries become durable: packs against one file per entry.

    python scripts/bench_write.py              # a table; some minutes, 15 GB of disk at a time

Entries have the size of 1024x1024 samples in float16. `latents` are image entries (128 KiB); `samples` alternate them
with text entries (prompt_embeds and pooled_prompt_embeds, 310.5 KiB). 1, 2 and 4 processes write at once into one cache
or folder, as the part's name says. A round lasts from the first start to the last end, when everything is durable.
Opening a cache and creating the entries is not timed. Each round uses new folders, nothing is deleted between rounds,
and dirty pages are synced before the clock starts. `files` writes one file per entry: to a temporary sibling, with an
fsync, a rename and an fsync of the folder, without which a power cut can lose the name.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from benchmarking import SHAPES, TINY_SHAPES, Shapes, in_turns, make_parser, ratios, run_parts, spread

from latentcache.identity import key_of
from latentcache.store.disk import DiskStore
from latentcache.types import Entry, Record

CASES = {"latents": ("image",), "samples": ("image", "text")}
"""Kinds of entries in each case; they alternate."""
START_S = 300.0
"""Timeout of the barrier, so that no process waits forever for one that failed."""
SETTLE_S = 10.0
"""Pause before a part: a disk mounted with `discard` stays busy for a while after the last part's files are deleted."""

Write = Callable[[Sequence[Entry]], int]
"""Writes entries durably. Returns how many."""


@contextmanager
def into_packs(folder: Path) -> Iterator[Write]:
    with DiskStore(folder) as store:
        yield store.add


@contextmanager
def into_files(folder: Path) -> Iterator[Write]:
    folder.mkdir(exist_ok=True)
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def write(entries: Sequence[Entry]) -> int:
        for entry in entries:
            temporary, path = folder / f".{entry.record.key}.tmp", folder / f"{entry.record.key}.safetensors"
            with temporary.open("xb", buffering=0) as file:
                data = safetensors.torch.save(dict(entry.tensors))
                assert file.write(data) == len(data)
                os.fsync(file.fileno())
            os.rename(temporary, path)
            os.fsync(folder_fd)
        return len(entries)

    try:
        yield write
    finally:
        os.close(folder_fd)


METHODS: dict[str, Callable[[Path], AbstractContextManager[Write]]] = {"packs": into_packs, "files": into_files}


def entries_of(case: str, numbers: range, shapes: Mapping[str, Shapes]) -> Iterator[Entry]:
    """Entries with these numbers and random values."""
    generator = torch.Generator().manual_seed(numbers.start)
    # A record of realistic size: the encoding is shared, the source is not.
    encoding = {"weights": "0f" * 32, "config": "f0" * 32, "compute_dtype": "float32", "store_dtype": "float16"}
    for number, kind in zip(numbers, itertools.cycle(CASES[case]), strict=False):
        identity = {"kind": kind, "source": f"{number:064x}", "encoding": encoding}
        provenance = {"path": f"photos/{number}.jpg", "software": {"torch": torch.__version__}}
        tensors = {name: torch.randn(shape, generator=generator).half() for name, shape in shapes[kind].items()}
        yield Entry(Record(key_of(identity), kind, identity, provenance), tensors)


barriers: list[Barrier] = []
"""The barrier of this writing process, at which all of them start."""


def begin(barrier: Barrier) -> None:
    """Initialise a writing process."""
    torch.set_num_threads(1)
    barriers.append(barrier)


def write(method: str, folder: Path, *made: Any) -> tuple[float, float]:
    """Write the entries that `entries_of` makes from `made`. Returns the start and end times."""
    entries = list(entries_of(*made))
    with METHODS[method](folder) as into:
        gc.collect()
        gc.disable()
        barriers[0].wait()
        start = time.monotonic()
        num_written = into(entries)
        end = time.monotonic()
        gc.enable()
    assert num_written == len(entries)
    return start, end


def measure(root: Path, options: argparse.Namespace, *, case: str, num_processes: int) -> dict[str, Any]:
    """Each method's time per entry with `num_processes` processes, and the speed-up of packs."""
    num_entries = 8 if options.tiny else {"latents": 1024, "samples": 768}[case]
    shapes = TINY_SHAPES if options.tiny else SHAPES
    if not options.tiny:
        os.sync()
        time.sleep(SETTLE_S)
    context = multiprocessing.get_context("forkserver")
    # Imported once in the fork server, which runs no torch code, so that forks inherit no threads.
    context.set_forkserver_preload(["latentcache.store.disk", "safetensors.torch"])
    barrier, numbers = context.Barrier(num_processes, timeout=START_S), itertools.count()
    with context.Pool(num_processes, begin, (barrier,)) as pool:  # reused by all rounds

        def timed(method: str) -> float:
            if not options.tiny:
                os.sync()
            folder = root / str(next(numbers))
            # Each process waits at the barrier with its task, so none takes two.
            firsts = [next(numbers) * num_entries for _ in range(num_processes)]
            tasks = [(method, folder, case, range(first, first + num_entries), shapes) for first in firsts]
            starts, ends = zip(*pool.starmap(write, tasks, chunksize=1), strict=True)
            return float(max(ends) - min(starts))

        for name in METHODS:
            timed(name)  # imports and first calls
        seconds = in_turns({name: partial(timed, name) for name in METHODS}, options.repetitions)
    us = {name: [each * 1e6 / num_entries / num_processes for each in taken] for name, taken in seconds.items()}
    return {
        "us_per_entry": {name: spread(values) for name, values in us.items()},
        "times_faster": ratios(seconds["files"], seconds["packs"]),
        "wanted_times_faster": 3,
    }


PARTS = {
    f"{case}_{num_processes}": partial(measure, case=case, num_processes=num_processes)
    for case, num_processes in itertools.product(CASES, (1, 2, 4))
}

if __name__ == "__main__":
    sys.exit(run_parts(PARTS, make_parser(__doc__, PARTS).parse_args()))
