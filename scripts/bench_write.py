"""How fast entries become durable: packs against one file per entry, and whether that stays so as a cache grows.

    python scripts/bench_write.py              # a table; some minutes, 15 GB of disk at a time
    python scripts/bench_write.py --json       # one document
    python scripts/bench_write.py --tiny       # for correctness only

Entries are those of 1024x1024 in float16: latents alone (128 KiB), and whole samples, which are two entries each as in
a precached dataset: latents, and prompt_embeds with pooled_prompt_embeds (310.5 KiB). 1, 2 and 4 processes write at the
same time into one cache or folder: a round's time is from the first start to the last end, when everything is durable.
Opening a cache and making the entries is not timed. Each round has fresh folders, nothing is deleted between rounds,
and what others left unwritten is synced before the clock starts. Durable files, one for each entry, are written as a
temporary sibling, fsynced and renamed; `files` also fsyncs the folder, without which a power cut can take the name
away. torch.save and diskcache sync nothing: they are there to show what people use. `growth` adds to caches that hold
many entries already.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from benchmarking import (
    FILE_FORMATS,
    SHAPES,
    in_turns,
    make_parser,
    parse,
    pickling_diskcache,
    ratios,
    run_parts,
    spread,
)

from latentcache.identity import key_of
from latentcache.store.disk import DiskStore
from latentcache.types import Entry, Record

NUM_PROCESSES = (1, 2, 4)
SIZES = (0, 10_000, 100_000)
CASES = {"latents": ("image",), "samples": ("image", "text")}
"""The kinds of entries that are written, in turns."""
DURABLE = ("packs", "files", "files_without_folder")
WANTED_TIMES = 3.0
START_S = 300.0
"""How long processes wait for each other: when one has failed, the others must not wait for ever."""
SETTLE_S = 10.0
"""After deleting a section's files: with `discard`, the disk is busy with them for a while."""

Write = Callable[[Sequence[Entry]], None]


class Task(NamedTuple):
    """What one process writes: `num_entries` of `case`, numbered from `first`."""

    method: str
    folder: Path
    case: str
    first: int
    num_entries: int


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


@contextmanager
def into_torch_files(folder: Path) -> Iterator[Write]:
    folder.mkdir(exist_ok=True)
    file_format = FILE_FORMATS["torch_load"]

    def write(entries: Sequence[Entry]) -> None:
        for entry in entries:
            file_format.save(entry.tensors, folder / f"{entry.record.key}{file_format.suffix}")

    yield write


@contextmanager
def into_diskcache(folder: Path) -> Iterator[Write]:
    with pickling_diskcache(folder) as cache:

        def write(entries: Sequence[Entry]) -> None:
            for entry in entries:
                cache.set(entry.record.key, dict(entry.tensors), retry=True)

        yield write


METHODS: dict[str, Callable[[Path], AbstractContextManager[Write]]] = {
    "packs": into_packs,
    "files": partial(into_files, sync_folder=True),
    "files_without_folder": partial(into_files, sync_folder=False),
    "torch_save": into_torch_files,
    "diskcache_pickle": into_diskcache,
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


def serve(connection: Connection, barrier: Barrier, scale: int) -> None:
    """Do tasks until there is none; send back when each began and ended."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(os.getpid())
    pools: dict[tuple[str, int], dict[str, torch.Tensor]] = {}

    def made(kind: str, num_entries: int, first: int) -> list[Entry]:
        if (kind, num_entries) not in pools:
            shapes = {name: (num_entries, *shape[:-1], shape[-1] // scale) for name, shape in SHAPES[kind].items()}
            pools[kind, num_entries] = {
                name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()
            }
        return entries_of(kind, pools[kind, num_entries], first)

    while (task := connection.recv()) is not None:
        kinds = CASES[task.case]
        assert task.num_entries % len(kinds) == 0
        by_turns = zip(*[made(kind, task.num_entries // len(kinds), task.first) for kind in kinds], strict=True)
        entries = list(chain.from_iterable(by_turns))
        with METHODS[task.method](task.folder) as write:
            gc.collect()
            gc.disable()
            barrier.wait()
            start = time.monotonic()
            write(entries)
            end = time.monotonic()
            gc.enable()
        connection.send((start, end))


class Workers:
    """Processes that stay, so that a round starts at once."""

    def __init__(self, num_processes: int, options: argparse.Namespace):
        context = multiprocessing.get_context("forkserver")
        # Imported once; torch is not used there, so its forks share no threads.
        context.set_forkserver_preload(["latentcache.store.disk", "safetensors.torch", "diskcache"])
        self.barrier = context.Barrier(num_processes, timeout=START_S)
        pairs = [context.Pipe() for _ in range(num_processes)]
        self.connections = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=serve, args=(theirs, self.barrier, options.scale)) for _, theirs in pairs
        ]
        for process, (_, theirs) in zip(self.processes, pairs, strict=True):
            process.start()
            theirs.close()
        self.num_written = 0
        self.tiny = options.tiny

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        for connection, process in zip(self.connections, self.processes, strict=True):
            if exc_type is None:
                connection.send(None)
            else:
                process.kill()  # it may wait for one that failed
            process.join()

    def write(self, method: str, folder: Path, case: str, num_entries: int) -> float:
        """Seconds for `num_entries` from each process, none of which was written before."""
        if not self.tiny:
            os.sync()
        for connection in self.connections:
            connection.send(Task(method, folder, case, self.num_written, num_entries))
            self.num_written += num_entries
        times = [connection.recv() for connection in self.connections]
        return float(max(end for _, end in times) - min(start for start, _ in times))


def us_per_entry(seconds: Sequence[float], num_entries: int) -> dict[str, float]:
    return spread([value * 1e6 / num_entries for value in seconds])


def measure(root: Path, case: str, num_processes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Each method's time per entry with so many processes, and how many times the packs are faster."""
    names = tuple(METHODS) if num_processes == 1 else DURABLE
    num_entries = options.num_entries[case]
    folders = (root / str(number) for number in range(sys.maxsize))
    with Workers(num_processes, options) as workers:

        def write(name: str) -> float:
            return workers.write(name, next(folders), case, num_entries)

        for name in names:
            write(name)  # imports and first calls
        seconds = in_turns({name: partial(write, name) for name in names}, options.repetitions, clock=lambda m: m())
    return {
        "us_per_entry": {name: us_per_entry(seconds[name], num_entries * num_processes) for name in names},
        "times_faster": {name: ratios(seconds[name], seconds["packs"]) for name in names if name != "packs"},
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
    with Workers(1, options) as workers:

        def write(size: int) -> float:
            return workers.write("packs", root / str(size), "latents", num_entries)

        for size in options.sizes:
            write(size)
        methods = {str(size): partial(write, size) for size in options.sizes}
        seconds = in_turns(methods, options.repetitions, clock=lambda method: method())
    first, last = str(options.sizes[0]), str(options.sizes[-1])
    return {
        "us_per_entry": {name: us_per_entry(values, num_entries) for name, values in seconds.items()},
        "ratio_largest_to_smallest": ratios(seconds[last], seconds[first]),
    }


@contextmanager
def section(folder: Path, options: argparse.Namespace) -> Iterator[Path]:
    """A folder for one set of rounds. It is deleted afterwards, and the disk gets time to come to rest."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        yield Path(place)
    if not options.tiny:
        os.sync()
        time.sleep(SETTLE_S)


def case(folder: Path, options: argparse.Namespace, *, name: str) -> dict[str, Any]:
    """Each method with 1, 2 and 4 processes."""
    found: dict[str, Any] = {"wanted_times_faster_than_files": WANTED_TIMES}
    for num_processes in NUM_PROCESSES:
        with section(folder, options) as root:
            found[f"{num_processes}_processes"] = measure(root, name, num_processes, options)
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
