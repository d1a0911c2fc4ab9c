"""How the index grows: opening, memory, finding, looking up and adding, from ten thousand entries to a million.

    python scripts/bench_index.py              # a table; a minute and 100 MB of disk
    python scripts/bench_index.py --json       # one document
    python scripts/bench_index.py --tiny       # for correctness only

The rows are those of 1024x1024 samples: half image entries (moments), half text entries (two fields), in packs of
64 MiB. The packs themselves are empty files of the right size: nothing here reads a payload. Each repetition opens the
cache in a new process, the page cache being warm; figures are medians. bench_plan.py measures planning.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from benchmarking import emit, environment, make_parser, parse, spread

from latentcache.store import DiskStore
from latentcache.store.entry import DTYPES
from latentcache.store.index import Index
from latentcache.store.layout import DIGEST_BYTES, KEY_BYTES, Column, Pack, PackRow, RowGroup
from latentcache.store.writer import PACK_BYTES

SIZES, TINY_SIZES = (10_000, 100_000, 1_000_000), (9_000, 18_000)
BATCH = 16
NUM_BATCHES = 500
PACK_ROWS = 512
Fields = dict[str, tuple[str, tuple[int, ...]]]
IMAGE: Fields = {"moments": ("float16", (8, 128, 128))}
TEXT: Fields = {"pooled_prompt_embeds": ("float16", (1280,)), "prompt_embeds": ("float16", (77, 2048))}
DATA_START = 4096
FIGURES = {
    "open_s": "open, for writing [s]",
    "open_read_only_s": "open, read-only [s]",
    "memory_mb": "memory of the index [MB]",
    "index_mb": "the index on disk [MB]",
    "find_us_per_key": "find all keys [us/key]",
    "look_up_new_us_per_key": f"look up {BATCH} keys, first time [us/key]",
    "look_up_again_us_per_key": f"look up {BATCH} keys, again [us/key]",
    "add_ms": f"the row of a new pack of {PACK_ROWS} [ms]",
}


def key_of(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


def rows(first: int, end: int) -> Iterator[PackRow]:
    """What packs of 64 MiB with the entries first ... end - 1 would say, half of them images."""
    middle = (first + end) // 2
    for fields, start, stop in ((IMAGE, first, middle), (TEXT, middle, end)):
        num_rows = PACK_BYTES // sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in fields.values())
        for begin in range(start, stop, num_rows):
            yield row_of(fields, range(begin, min(begin + num_rows, stop)))


def row_of(fields: Fields, numbers: range) -> PackRow:
    at, columns = DATA_START, []
    for name, (dtype, shape) in fields.items():
        columns.append(Column(name, dtype, shape, at, len(numbers)))
        at += columns[-1].row_bytes * len(numbers)
    group = RowGroup("image" if fields is IMAGE else "text", 0, len(numbers), tuple(columns))
    keys = np.frombuffer(bytes.fromhex("".join(map(key_of, numbers))), np.uint8).reshape(-1, KEY_BYTES)
    digests = np.ascontiguousarray(keys[:, :DIGEST_BYTES])
    return PackRow.new(Pack(key_of(-1 - numbers.start)[:32], at, (group,)), keys, digests)


def make_file(store: DiskStore, row: PackRow) -> None:
    path = store.directory.pack_path(row.pack.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, row.pack.file_bytes)


def build(root: Path, num_entries: int) -> None:
    with DiskStore(root) as store, Index(store.directory.index).transaction() as transaction:
        for row in rows(0, num_entries):
            make_file(store, row)
            transaction.put(row)


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def timed_open(root: Path, *, read_only: bool = False) -> tuple[float, DiskStore]:
    start = time.perf_counter()
    store = DiskStore(root, read_only=read_only)
    return time.perf_counter() - start, store


def per_key_us(store: DiskStore, batches: list[list[str]]) -> float:
    start = time.perf_counter()
    for batch in batches:
        store.look_up(batch)
    return (time.perf_counter() - start) * 1e6 / sum(map(len, batches))


def add_pack(store: DiskStore, numbers: range) -> float:
    """Seconds that the index takes to learn of a new pack, durably."""
    row = row_of(IMAGE, numbers)
    make_file(store, row)
    start = time.perf_counter()
    num_added = store.add_row(row)
    seconds = time.perf_counter() - start
    assert num_added == len(numbers)
    return seconds


def measure(root: Path, num_entries: int, seed: int) -> dict[str, float]:
    """One repetition, in a process of its own."""
    source = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        DiskStore(folder).close()  # imports and first calls
    gc.collect()
    before = resident_mb()
    figures: dict[str, float] = {}
    figures["open_s"], store = timed_open(root)
    gc.collect()
    figures["memory_mb"] = resident_mb() - before
    numbers = source.sample(range(num_entries), min(num_entries, BATCH * NUM_BATCHES))
    wanted = [key_of(number) for number in numbers]
    batches = [wanted[at : at + BATCH] for at in range(0, len(wanted), BATCH)]
    store.look_up([key_of(num_entries // 2)])
    figures["look_up_new_us_per_key"] = per_key_us(store, batches)
    figures["look_up_again_us_per_key"] = per_key_us(store, batches)
    keys = [key_of(number) for number in range(num_entries)]
    start = time.perf_counter()
    found = store.find(keys)
    figures["find_us_per_key"] = (time.perf_counter() - start) * 1e6 / num_entries
    assert len(found) == num_entries and store.look_up(wanted[:1])[0] is not None
    first = num_entries * 2 + seed * 2 * PACK_ROWS
    add_pack(store, range(first, first + PACK_ROWS))  # the first change of a process writes the settings too
    figures["add_ms"] = add_pack(store, range(first + PACK_ROWS, first + 2 * PACK_ROWS)) * 1e3
    figures["index_mb"] = store.stats().index_bytes / 1e6
    store.close()
    figures["open_read_only_s"], store = timed_open(root, read_only=True)
    store.close()
    return figures


def repeat(root: Path, num_entries: int, num_repetitions: int) -> list[dict[str, float]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    results = []
    for seed in range(num_repetitions):
        command = [sys.executable, __file__, "--worker", str(root), str(num_entries), str(seed)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        results.append(json.loads(done.stdout))
    return results


def run(options: argparse.Namespace) -> dict[str, Any]:
    sizes = TINY_SIZES if options.tiny else SIZES
    by_size: dict[int, dict[str, Any]] = {}
    for num_entries in sizes:
        with tempfile.TemporaryDirectory(dir=options.folder) as root:
            start = time.perf_counter()
            build(Path(root), num_entries)
            build_s = time.perf_counter() - start
            results = repeat(Path(root), num_entries, options.repetitions)
        by_size[num_entries] = {name: spread([result[name] for result in results]) for name in FIGURES}
        by_size[num_entries]["build_s"] = build_s
    first, last = by_size[sizes[0]], by_size[sizes[-1]]
    return {
        "sizes": list(sizes),
        "results": {str(size): figures for size, figures in by_size.items()},
        "ratio_largest_to_smallest": {
            name: last[name]["median"] / first[name]["median"] if first[name]["median"] > 0 else None
            for name in FIGURES
        },
        "sqlite": sqlite3.sqlite_version,
        **environment(folder=options.folder or tempfile.gettempdir()),
    }


def to_text(report: Mapping[str, Any]) -> str:
    sizes = report["sizes"]
    lines = [f"{'':52}" + "".join(f"{size:>12,}" for size in sizes) + f"{'x':>8}"]
    for name, title in FIGURES.items():
        values = "".join(f"{report['results'][str(size)][name]['median']:12.4g}" for size in sizes)
        ratio = report["ratio_largest_to_smallest"][name]
        lines.append(f"{title:52}{values}" + (f"{ratio:8.3g}" if ratio is not None else f"{'-':>8}"))
    repetitions = report["settings"]["repetitions"]
    lines.append(f"medians of {repetitions} repetitions; x: the largest cache to the smallest")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--worker", nargs=3, metavar=("ROOT", "NUM_ENTRIES", "SEED"), help=argparse.SUPPRESS)
    options = parse(parser)
    if options.worker:
        root, num_entries, seed = options.worker
        print(json.dumps(measure(Path(root), int(num_entries), int(seed))))
        return
    emit(run(options), options, to_text)


if __name__ == "__main__":
    main()
