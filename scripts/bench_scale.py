"""What a very large cache costs: the rows of its index, its manifest and its plan are really made, without payload.

    python scripts/bench_scale.py                          # 10 million samples; half an hour, 10 GB of disk
    python scripts/bench_scale.py --samples 1000000
    python scripts/bench_scale.py --tiny                   # for correctness only

A sample is one image entry and one text entry, as in bench_index.py, whose packs are empty files of the right size.
Each step runs in a process of its own, once. `peak_mb` is that of the whole process, of which Python with the package
takes some 500. The plan is what `precache` does with a dataset whose files it knows: it looks up all keys, counts
hits, and makes the manifest again. Reading and hashing files is not in it (bench_plan.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attack_limits import status_bytes
from bench_index import build, key_of
from benchmarking import emit, environment, make_parser

from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import CaptionRef, ImageRef, Row, RowTable, RowTableBuilder
from latentcache.store import DiskStore
from latentcache.types import Crop, Geometry, Size

SAMPLES, TINY_SAMPLES = 10_000_000, 3_000
CHUNK = 1024
NAME = "photos"
COMMON = {"schema": 1, "salt": "", "text_encoding": {}}
SIZES = [Size(768 + 16 * step, 1344 - 16 * step) for step in range(37)]


def row_of(number: int, num_samples: int) -> Row:
    sample_id = f"{number // 1000:06d}/{number}.jpg"
    size = SIZES[number % len(SIZES)]
    image = ImageRef(key_of(number), Geometry(size, size, Crop(0, 0), size))
    caption = CaptionRef(f"photo number {number}, of a grey wall in the evening", key_of(num_samples + number))
    return Row(sample_id, f"/data/photos/{sample_id}", key_of(-1 - number), (image,), (caption,))


def table_of(chunks: Iterator[list[Row]]) -> RowTable:
    builder = RowTableBuilder()
    for chunk in chunks:
        builder.add(chunk)
    return builder.finish()


def make_index(root: Path, num_samples: int) -> dict[str, float]:
    build(root, 2 * num_samples)
    return {"bytes": sum(file.stat().st_size for file in (root / "index").rglob("*"))}


def open_index(root: Path, num_samples: int) -> dict[str, float]:
    with DiskStore(root) as store:
        assert sum(store.stats().num_entries.values()) == 2 * num_samples
    return {}


def make_manifest(root: Path, num_samples: int) -> dict[str, float]:
    starts = range(0, num_samples, CHUNK)
    chunks = ([row_of(at, num_samples) for at in range(start, min(start + CHUNK, num_samples))] for start in starts)
    folder = ManifestFolder(root / "manifests")
    folder.write(Manifest(NAME, "train", 1, COMMON, table_of(chunks)))
    return {"bytes": (folder.path / f"{NAME}.safetensors").stat().st_size}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def read_manifest(root: Path, num_samples: int) -> dict[str, float]:
    before = resident()
    manifest = read(root)
    assert len(manifest.rows) == num_samples
    return {"bytes_per_sample": (resident() - before) / num_samples}


def read(root: Path) -> Manifest:
    manifest = ManifestFolder(root / "manifests").read(NAME)
    assert manifest is not None
    return manifest


def plan(root: Path, num_samples: int) -> dict[str, float]:
    # It imports the models' code: only this step pays for it.
    from latentcache.precache.tasks import Entries, Shard

    with DiskStore(root, read_only=True) as store:
        rows, entries, new = read(root).rows, Entries(store, Shard()), RowTableBuilder()
        for start in range(0, len(rows), CHUNK):
            chunk = rows.rows(start, start + CHUNK)
            present = store.find({key for row in chunk for key in row.keys()})
            for row in chunk:
                found = [entries.is_miss(ref.key, present, "image", ref.geometry.extent, 16) for ref in row.images]
                found += [entries.is_miss(ref.key, present, "text", "", 16) for ref in row.captions]
                assert not any(found), "an entry of the manifest is not in the index"
            new.add(chunk)
        assert entries.finish().report.num_hits == 2 * num_samples and len(new.finish()) == num_samples
    return {}


STEPS: dict[str, Callable[[Path, int], dict[str, float]]] = {
    step.__name__: step for step in (make_index, open_index, make_manifest, read_manifest, plan)
}


def run_step(name: str, root: Path, num_samples: int) -> dict[str, float]:
    start = time.perf_counter()
    figures = STEPS[name](root, num_samples)
    seconds = time.perf_counter() - start
    peak_mb = status_bytes("VmHWM") / (1 << 20)
    return {"seconds": seconds, "us_per_sample": seconds * 1e6 / num_samples, "peak_mb": peak_mb, **figures}


def run(options: argparse.Namespace) -> dict[str, Any]:
    num_samples = options.samples or (TINY_SAMPLES if options.tiny else SAMPLES)
    variables, results = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, {}
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        for name in STEPS:
            command = [sys.executable, __file__, "--worker", name, root, str(num_samples)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=variables)
            results[name] = json.loads(done.stdout)
        where = environment(folder=root)
    return {"num_samples": num_samples, "steps": results, **where}


def to_text(document: Mapping[str, Any]) -> str:
    lines = [f"{document['num_samples']:,} samples"]
    for name, figures in document["steps"].items():
        rest = "".join(f"  {key} {value:,.0f}" for key, value in figures.items() if "bytes" in key)
        seconds, each, peak = figures["seconds"], figures["us_per_sample"], figures["peak_mb"]
        lines.append(f"{name:15}{seconds:10.1f} s{each:8.1f} us/sample{peak:10,.0f} MB{rest}")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, help=f"how many samples (default: {SAMPLES:,})")
    parser.add_argument("--worker", nargs=3, metavar=("STEP", "ROOT", "NUM_SAMPLES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, root, num_samples = options.worker
        print(json.dumps(run_step(name, Path(root), int(num_samples))))
        return
    emit(run(options), options, to_text)


if __name__ == "__main__":
    main()
