"""How fast entries become durable: packs against one file per entry, and whether that stays so as a cache grows.

    python scripts/bench_write.py              # a table; some minutes, 15 GB of disk at a time
    python scripts/bench_write.py --json       # one document
    python scripts/bench_write.py --tiny       # for correctness only

Entries are those of 1024x1024 in float16: latents alone (128 KiB), and whole samples, which are two entries each as in
a precached dataset: latents, and prompt_embeds with pooled_prompt_embeds (310.5 KiB). 1, 2 and 4 processes write at the
same time into one cache or folder: a round's time is from the first start to the last end, when everything is durable.
Opening a cache and making the entries is not timed. Each round has fresh folders, nothing is deleted between rounds,
and what others left unwritten is synced before the clock starts. Files, one for each entry, are written as a temporary
sibling, fsynced and renamed; `files` also fsyncs the folder, without which a power cut can take the name away. `growth`
adds to caches that hold many entries already.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from benchmarking import SHAPES, in_turns, make_parser, parse, ratios, run_parts, spread

from latentcache.identity import key_of
from latentcache.store.disk import DiskStore
from latentcache.types import Entry, Record

NUM_PROCESSES = (1, 2, 4)
SIZES = (0, 10_000, 100_000)
CASES = {"latents": ("image",), "samples": ("image", "text")}
"""The kinds of entries that are written, in turns."""
WANTED_TIMES = 3.0
START_S = 300.0
"""How long processes wait for each other: when one has failed, the others must not wait for ever."""
SETTLE_S = 10.0
"""After deleting a section's files: with `discard`, the disk is busy with them for a while."""

Write = Callable[[Sequence[Entry]], None]


class Task(NamedTuple):
    """What one process writes: `num_entries` of `case`, numbered from `first`. `scale` divides the last side."""

    method: str
    folder: Path
    case: str
    first: int
    num_entries: int
    scale: int


@contextmanager
def into_packs(folder: Path) -> Iterator[Write]:
    with DiskStore(folder) as store:

        def write(entries: Sequence[Entry]) -> None:
            with store.writer() as writer:
                for entry in entries:
                    writer.add(entry)
            assert writer.num_added == len(entries)

        yield write


@contextmanager
def into_files(folder: Path, *, sync_folder: bool) -> Iterator[Write]:
    folder.mkdir(exist_ok=True)
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def write(entries: Sequence[Entry]) -> None:
        for entry in entries:
            temporary, path = folder / f".{entry.record.key}.tmp", folder / f"{entry.record.key}.safetensors"
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            data = safetensors.torch.save(dict(entry.tensors))
            assert os.write(fd, data) == len(data)
            os.fsync(fd)
            os.close(fd)
            os.rename(temporary, path)
            if sync_folder:
                os.fsync(folder_fd)

    try:
        yield write
    finally:
        os.close(folder_fd)


METHODS: dict[str, Callable[[Path], AbstractContextManager[Write]]] = {
    "packs": into_packs,
    "files": partial(into_files, sync_folder=True),
    "files_without_folder": partial(into_files, sync_folder=False),
}


def entries_of(kind: str, tensors: Mapping[str, torch.Tensor], first: int) -> list[Entry]:
    """An entry per row, numbered from `first`."""
    num_rows = len(next(iter(tensors.values())))
    entries = []
    for row in range(num_rows):
        # As much text as a real record has: the encoder is the same in all of them, the source is not.
        encoding = {"weights": "0f" * 32, "config": "f0" * 32, "compute_dtype": "float32", "store_dtype": "float16"}
        identity = {"kind": kind, "source": f"{first + row:064x}", "encoding": encoding}
        provenance = {"path": f"photos/{first + row}.jpg", "software": {"torch": torch.__version__}}
        values = {name: tensor[row].clone() for name, tensor in tensors.items()}
        entries.append(Entry(Record(key_of(identity), kind, identity, provenance), values))
    return entries


@cache
def values_of(kind: str, num_entries: int, scale: int) -> dict[str, torch.Tensor]:
    """Random tensors of each process' own, a row for each entry."""
    generator = torch.Generator().manual_seed(os.getpid())
    return {
        name: torch.randn((num_entries, *shape[:-1], shape[-1] // scale), generator=generator).half()
        for name, shape in SHAPES[kind].items()
    }


barriers: list[Barrier] = []
"""Of a process that writes: the one at which all wait for each other."""


def begin(barrier: Barrier) -> None:
    """Make this process one of those that write."""
    torch.set_num_threads(1)
    barriers.append(barrier)


def write(task: Task) -> tuple[float, float]:
    """Write the entries of a task in a process of its own. Returns when that began and when it ended."""
    kinds = CASES[task.case]
    num_each = task.num_entries // len(kinds)
    made = [entries_of(kind, values_of(kind, num_each, task.scale), task.first) for kind in kinds]
    entries = list(itertools.chain.from_iterable(zip(*made, strict=True)))
    with METHODS[task.method](task.folder) as into:
        gc.collect()
        gc.disable()
        barriers[0].wait()
        start = time.monotonic()
        into(entries)
        end = time.monotonic()
        gc.enable()
    return start, end


@contextmanager
def writers(num_processes: int, options: argparse.Namespace) -> Iterator[Callable[[str, Path, str, int], float]]:
    """Processes that stay, so that a round starts at once.

    What it gives returns the seconds for so many entries of a case from each process, none of which was written before.
    """
    context = multiprocessing.get_context("forkserver")
    # Imported once; torch is not used there, so its forks share no threads.
    context.set_forkserver_preload(["latentcache.store.disk", "safetensors.torch"])
    numbers = itertools.count()
    barrier = context.Barrier(num_processes, timeout=START_S)
    with context.Pool(num_processes, begin, (barrier,)) as pool:

        def seconds(method: str, folder: Path, case: str, num_entries: int) -> float:
            if not options.tiny:
                os.sync()
            # Each waits at the barrier with its task, so no process gets two.
            firsts = [next(numbers) * num_entries for _ in range(num_processes)]
            tasks = [Task(method, folder, case, first, num_entries, options.scale) for first in firsts]
            times = pool.map(write, tasks, chunksize=1)
            return max(end for _, end in times) - min(start for start, _ in times)

        yield seconds


def us_per_entry(seconds: Sequence[float], num_entries: int) -> dict[str, float]:
    return spread([value * 1e6 / num_entries for value in seconds])


def measure(root: Path, case: str, num_processes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Each method's time per entry with so many processes, and how many times the packs are faster."""
    num_entries = options.num_entries[case]
    folders = (root / str(number) for number in itertools.count())
    with writers(num_processes, options) as seconds_of:

        def timed(name: str) -> float:
            return seconds_of(name, next(folders), case, num_entries)

        for name in METHODS:
            timed(name)  # imports and first calls
        seconds = in_turns({name: partial(timed, name) for name in METHODS}, options.repetitions, clock=lambda m: m())
    return {
        "us_per_entry": {name: us_per_entry(taken, num_entries * num_processes) for name, taken in seconds.items()},
        "times_faster": {name: ratios(seconds[name], seconds["packs"]) for name in METHODS if name != "packs"},
    }


def fill(folder: Path, num_entries: int) -> None:
    """A cache that holds so many entries, of one value each."""
    with DiskStore(folder) as store:
        for first in range(0, num_entries, 10_000):
            numbers = range(first, min(first + 10_000, num_entries))
            store.add(entries_of("image", {"latents": torch.zeros(len(numbers), 1)}, first + (1 << 40)))


def growth(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Time per entry in caches that hold many already."""
    num_entries = options.num_entries["latents"]
    for size in options.sizes:
        fill(root / str(size), size)
    with writers(1, options) as seconds_of:
        methods = {
            str(size): partial(seconds_of, "packs", root / str(size), "latents", num_entries) for size in options.sizes
        }
        for method in methods.values():
            method()
        seconds = in_turns(methods, options.repetitions, clock=lambda method: method())
    first, *_, last = seconds.values()
    return {
        "us_per_entry": {name: us_per_entry(values, num_entries) for name, values in seconds.items()},
        "ratio_largest_to_smallest": ratios(last, first),
    }


def case(folder: Path, options: argparse.Namespace, *, name: str) -> dict[str, Any]:
    """Each method with 1, 2 and 4 processes, each number in a folder that is deleted before the next."""
    found: dict[str, Any] = {"wanted_times_faster_than_files": WANTED_TIMES}
    for num_processes in NUM_PROCESSES:
        with tempfile.TemporaryDirectory(dir=folder) as root:
            found[f"{num_processes}_processes"] = measure(Path(root), name, num_processes, options)
        if not options.tiny:
            os.sync()
            time.sleep(SETTLE_S)
    return found


PARTS = {name: partial(case, name=name) for name in CASES} | {"growth": growth}


def main() -> None:
    options = parse(make_parser(__doc__, PARTS))
    options.scale, options.sizes, options.num_entries = 1, SIZES, {"latents": 1024, "samples": 768}
    if options.tiny:
        options.scale, options.sizes, options.num_entries = 64, (0, 100), {"latents": 8, "samples": 8}
    run_parts(PARTS, options)


if __name__ == "__main__":
    main()
