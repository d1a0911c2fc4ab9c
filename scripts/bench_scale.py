"""Scaling with the number of entries: the index, a manifest, and planning an unchanged dataset.

    python scripts/bench_scale.py                  # all parts; an hour, 3 GB of disk
    python scripts/bench_scale.py --part index     # one part: a minute and 100 MB

index     open, find, look up and add, and memory, for ten thousand to a million entries: half images (moments) and half
          texts (two fields) of 1024x1024 samples, in packs of 64 MiB. The packs are sparse files of the right size, as
          nothing here reads a payload
manifest  read a manifest of a million samples and verify its digest
replan    `run_precache(dry_run=True)` on 10,000 and 100,000 small PNG files with captions that are all cached: the time
          of `latentcache precache --dry-run` until it reports that there is nothing to do

Each measurement runs in its own process with a warm page cache. `peak_mb` includes Python and the package, about 300.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import math
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from benchmarking import Shapes, make_parser, memory_bytes, run_parts, seconds_of, spread
from PIL import Image

from latentcache.config import Config
from latentcache.config_file import parse_config
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Ref, Row, RowTableBuilder
from latentcache.dataset.samples import SETTLED_NS
from latentcache.store import DiskStore
from latentcache.store.index import Index
from latentcache.store.layout import DIGEST_BYTES, KEY_BYTES, Column, Pack, PackRow, RowGroup
from latentcache.store.writer import PACK_BYTES
from latentcache.types import Crop, Geometry, Size

BATCH = 16
NUM_BATCHES = 500
PACK_ROWS = 512
IMAGE: Shapes = {"moments": (8, 128, 128)}
TEXT: Shapes = {"pooled_prompt_embeds": (1280,), "prompt_embeds": (77, 2048)}
"""Fields in float16."""
DATA_START = 4096
SIZES = [Size(768 + 16 * step, 1344 - 16 * step) for step in range(37)]


def repeat(
    measure: Callable[[Path, int, int], dict[str, float]], repetitions: int, root: Path, size: int
) -> dict[str, dict[str, float]]:
    """Median, min and max of the figures of a measurement, each time in a new process."""
    found = []
    for seed in range(repetitions):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
            found.append(executor.submit(measure, root, size, seed).result())
    return {name: spread([each[name] for each in found]) for name in found[0]}


# The index, whose rows have no payload --------------------------------------------------------------------------------


def key_of(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


def rows(end: int) -> Iterator[PackRow]:
    """Index rows of packs of 64 MiB with the entries 0 ... end - 1, half of them images."""
    for fields, start, stop in ((IMAGE, 0, end // 2), (TEXT, end // 2, end)):
        num_rows = PACK_BYTES // sum(2 * math.prod(shape) for shape in fields.values())
        for begin in range(start, stop, num_rows):
            yield row_of(fields, range(begin, min(begin + num_rows, stop)))


def row_of(fields: Shapes, numbers: range) -> PackRow:
    at, columns = DATA_START, []
    for name, shape in fields.items():
        columns.append(Column(name, "float16", shape, at, len(numbers)))
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


def index(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    by_size: dict[str, Any] = {}
    for num_entries in (9_000, 18_000) if options.tiny else (10_000, 100_000, 1_000_000):
        root = folder / str(num_entries)
        with DiskStore(root) as store, Index(store.directory.index).transaction() as transaction:
            for row in rows(num_entries):
                make_file(store, row)
                transaction.put(row)
        by_size[str(num_entries)] = repeat(measure_index, options.repetitions, root, num_entries)
    return by_size | {"wanted": {"open_s": 0.5, "memory_mb": 130, "index_mb": 60, "add_pack_ms": 20}}


def measure_index(root: Path, num_entries: int, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        DiskStore(folder).close()  # warms imports and first calls
    gc.collect()
    before = memory_bytes("VmRSS")
    figures: dict[str, float] = {}
    start = time.perf_counter()
    store = DiskStore(root)
    figures["open_s"] = time.perf_counter() - start
    gc.collect()
    figures["memory_mb"] = (memory_bytes("VmRSS") - before) / 1e6
    numbers = random.Random(seed).sample(range(num_entries), min(num_entries, BATCH * NUM_BATCHES))
    wanted = [key_of(number) for number in numbers]
    store.look_up([key_of(num_entries // 2)])
    taken = seconds_of(lambda: [store.look_up(wanted[at : at + BATCH]) for at in range(0, len(wanted), BATCH)])
    figures["look_up_us_per_key"] = taken * 1e6 / len(wanted)
    keys = [key_of(number) for number in range(num_entries)]
    start = time.perf_counter()
    found = store.find(keys)
    figures["find_us_per_key"] = (time.perf_counter() - start) * 1e6 / num_entries
    assert len(found) == num_entries and store.look_up(wanted[:1])[0] is not None
    for number in range(2):  # a process's first change also writes diskcache's settings
        first = num_entries * 2 + (seed * 2 + number) * PACK_ROWS
        row = row_of(IMAGE, range(first, first + PACK_ROWS))
        make_file(store, row)
        start = time.perf_counter()
        num_added = store.add_row(row)
        figures["add_pack_ms"] = (time.perf_counter() - start) * 1e3
        assert num_added == PACK_ROWS
    figures["index_mb"] = sum(file.stat().st_size for file in store.directory.index.glob("cache.db*")) / 1e6
    store.close()
    figures["open_read_only_s"] = seconds_of(lambda: DiskStore(root, read_only=True).close())
    return figures


# A manifest -----------------------------------------------------------------------------------------------------------


def manifest(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    num_samples = 3_000 if options.tiny else 1_000_000
    builder = RowTableBuilder()
    for number in range(num_samples):
        sample_id, size = f"{number // 1000:06d}/{number}.jpg", SIZES[number % len(SIZES)]
        image = Ref(key_of(number), Geometry(size, size, Crop(0, 0), size))
        text = f"photo number {number}, of a grey wall in the evening"
        caption = Ref.of_text(text, key_of(num_samples + number))
        builder.add(Row(sample_id, f"/data/photos/{sample_id}", key_of(-1 - number), (image,), (caption,)))
    folder, common = ManifestFolder(root), {"schema": 1, "salt": "", "text_encoding": {}}
    folder.write(Manifest("photos", "train", 1, common, builder.finish()))
    found = repeat(measure_manifest, options.repetitions, root, num_samples)
    num_bytes = (folder.path / "photos.safetensors").stat().st_size
    wanted = {"read_s": 0.5, "bytes_per_sample": 300}
    return found | {"bytes_per_sample": num_bytes / num_samples, "wanted": wanted}


def measure_manifest(root: Path, num_samples: int, seed: int) -> dict[str, float]:
    start = time.perf_counter()
    found = ManifestFolder(root).read("photos")
    seconds = time.perf_counter() - start
    assert found is not None and len(found.rows) == num_samples
    return {"read_s": seconds}


# Planning again -------------------------------------------------------------------------------------------------------


def config_of(root: Path) -> Config:
    source = {"kind": "folder", "path": str(root / "photos")}
    buckets = {"area": 64 * 64, "step": 8}
    dataset = {"name": "photos", "source": source, "images": {"min_side": 8}, "buckets": buckets}
    model = {"path": "tiny-photos"}  # a folder like a user's, so the memo holds its digests
    return parse_config({"cache": {"path": str(root / "cache")}, "model": model, "datasets": [dataset]})


def replan(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    from latentcache.precache.run import run_precache  # imports diffusers, which the processes of other parts lack

    results: dict[str, Any] = {"wanted": {"seconds_for_100000": 3}}
    first = 0
    for size in (20,) if options.tiny else (10_000, 100_000):
        make_photos(folder / "photos", first, size)
        first = size
        time.sleep(SETTLED_NS / 1e9)  # files that were just written are not memoised
        run_precache(config_of(folder))
        if not options.tiny:
            repeat(measure_replan, 1, folder, size)  # warms the page cache
        results[str(size)] = repeat(measure_replan, options.repetitions, folder, size)
    return results


def make_photos(folder: Path, first: int, end: int) -> None:
    """Write small, distinct images with captions, 1,000 per folder."""
    image = Image.new("RGB", (64, 64), (120, 130, 140))
    for number in range(first, end):
        parent = folder / f"{number // 1000:04d}"
        parent.mkdir(parents=True, exist_ok=True)
        image.putpixel((0, 0), (number >> 16 & 255, number >> 8 & 255, number & 255))
        image.save(parent / f"{number}.png", compress_level=1)
        (parent / f"{number}.txt").write_text(f"photo number {number}, of a grey wall in the evening", encoding="utf-8")


def measure_replan(root: Path, num_samples: int, seed: int) -> dict[str, float]:
    import latentcache.precache.encodings  # noqa: F401 - its import takes a second that is not planning
    from latentcache.precache.run import run_precache

    config = config_of(root)
    start = time.perf_counter()
    report = run_precache(config, dry_run=True)
    seconds = time.perf_counter() - start
    assert report.num_misses == 0 and report.num_samples == num_samples, report.to_text()
    return {"seconds": seconds, "us_per_sample": seconds * 1e6 / num_samples, "peak_mb": memory_bytes("VmHWM") / 1e6}


PARTS = {"index": index, "manifest": manifest, "replan": replan}

if __name__ == "__main__":
    sys.exit(run_parts(PARTS, make_parser(__doc__, PARTS).parse_args()))
