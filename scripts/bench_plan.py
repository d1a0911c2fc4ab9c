"""How long an unchanged dataset takes to plan: files that were seen, captions that are read, entries that are there.

    python scripts/bench_plan.py                      # 10,000 and 100,000 samples; some minutes, 1.5 GB of disk
    python scripts/bench_plan.py --json               # one document
    python scripts/bench_plan.py --tiny               # for correctness only

The dataset is a folder of small PNG files, each with a caption in a .txt file. Its entries are in the cache; their
tensors are tiny, since planning never reads them. Each repetition is `run_precache(dry_run=True)` in a new process with
a warm page cache: what `latentcache precache --dry-run` does before it says that there is nothing to do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attack_limits import status_bytes
from benchmarking import emit, environment, make_parser, parse, spread
from PIL import Image

from latentcache.config import Config
from latentcache.dataset.samples import SETTLED_NS
from latentcache.precache.encodings import choose_encodings, load_models
from latentcache.precache.plan import make_plan
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import open_workspace
from latentcache.types import Entry, Record

SIZES, TINY_SIZES = (10_000, 100_000), (20, 40)
WANTED_S = 20.0
"""For 100,000 files on two cores."""


def config_of(root: Path) -> Config:
    return Config.model_validate(
        {
            "cache": {"path": str(root / "cache")},
            "model": {"path": "tiny-photos"},  # a folder, as a user has one: its facts are in the memo
            "datasets": [
                {
                    "name": "photos",
                    "source": {"kind": "folder", "path": str(root / "photos")},
                    "images": {"min_side": 8},
                }
            ],
        }
    )


def make_photos(folder: Path, first: int, end: int) -> None:
    """Small images, each with bytes of its own, with captions, 1,000 to a folder."""
    image = Image.new("RGB", (64, 64), (120, 130, 140))
    for number in range(first, end):
        parent = folder / f"{number // 1000:04d}"
        parent.mkdir(parents=True, exist_ok=True)
        image.putpixel((0, 0), (number >> 16 & 255, number >> 8 & 255, number & 255))
        image.save(parent / f"{number}.png", compress_level=1)
        (parent / f"{number}.txt").write_text(f"photo number {number}, of a grey wall in the evening", encoding="utf-8")


def fill(config: Config) -> None:
    """Make every key of the plan an entry, and write the manifests: as a precache run leaves the cache."""
    with open_workspace(config.cache) as workspace:
        models = load_models(config.model, workspace.memo)
        plan = make_plan(config, workspace, choose_encodings(config, models, workspace.memo), models)
        tiny = {"latents": torch.ones(1, dtype=torch.float16)}

        def entries() -> Iterator[Entry]:
            for batches in plan.batches.values():
                for task in (task for batch in batches for task in batch):
                    yield Entry(Record(task.key, task.identity.kind, task.identity.to_json(), {}), tiny)

        workspace.store.add(entries())
        for manifest in plan.manifests:
            workspace.manifests.write(manifest)


def plan_once(root: Path) -> dict[str, float]:
    """Plan again, in a process of its own."""
    config = config_of(root)
    start = time.perf_counter()
    report = run_precache(config, dry_run=True)
    seconds = time.perf_counter() - start
    assert report.num_misses == 0 and report.num_samples > 0, report.to_text()
    peak_mb = status_bytes("VmHWM") / (1 << 20)
    return {"seconds": seconds, "peak_memory_mb": peak_mb, "us_per_sample": seconds * 1e6 / report.num_samples}


def repeat(root: Path, num_repetitions: int) -> dict[str, dict[str, float]]:
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, "--worker", str(root)]
    results = []
    for _ in range(num_repetitions + 1):
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=variables)
        results.append(json.loads(done.stdout))
    # The first one warms the page cache.
    return {name: spread([result[name] for result in results[1:]]) for name in results[0]}


def run(options: argparse.Namespace) -> dict[str, Any]:
    sizes = tuple(options.sizes or (TINY_SIZES if options.tiny else SIZES))
    # A file that was written just now is not remembered: it may change again within its time stamp.
    settled_s = SETTLED_NS / 1e9
    results = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root, first = Path(folder), 0
        for size in sizes:
            make_photos(root / "photos", first, size)
            first = size
            time.sleep(settled_s)
            fill(config_of(root))
            results[str(size)] = repeat(root, options.repetitions)
        where = environment(folder=root)
    return {"replan": results, "wanted_s_for_100000": WANTED_S, **where}


def to_text(document: Mapping[str, Any]) -> str:
    lines = [f"{'samples':>10}{'plan again [s]':>28}{'us per sample':>16}{'peak memory [MB]':>18}"]
    for size, found in document["replan"].items():
        seconds = found["seconds"]
        times = f"{seconds['median']:.2f} ({seconds['min']:.2f}..{seconds['max']:.2f})"
        per_sample, memory = found["us_per_sample"]["median"], found["peak_memory_mb"]["median"]
        lines.append(f"{int(size):>10,}{times:>28}{per_sample:>16.1f}{memory:>18.0f}")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", help=f"numbers of samples, ascending (default: {SIZES})")
    parser.add_argument("--worker", metavar="ROOT", help=argparse.SUPPRESS)
    options = parse(parser)
    if options.worker:
        print(json.dumps(plan_once(Path(options.worker))))
        return
    emit(run(options), options, to_text)


if __name__ == "__main__":
    main()
