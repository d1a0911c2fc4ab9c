"""Precaching on Ray with encoders that only wait: how well it scales, and what it costs where nothing is to be done.

    python scripts/bench_ray.py            # a table; about six minutes on two cores
    python scripts/bench_ray.py --json     # one document
    python scripts/bench_ray.py --tiny     # for correctness only

The real driver, encoder processes, packs and manifests; but an encoder waits for a fixed time in place of decoding and
computing, as a GPU makes its process wait. One encoder gets N batches, and eight get eight times as many.

times_of_one   batches a second of all encoders, against those of one; eight at best. From the begin of the first batch
               to the end of the last one: that encoders start is not in it
gap_ms         between the end of a batch and the begin of the next, in one encoder
nothing_s      the whole run again, when Ray is up and everything is cached; `num_started` encoders
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

import benchmarking
import numpy as np
import ray
import torch
from PIL import Image

from latentcache.config import Config
from latentcache.config_file import parse_config
from latentcache.precache.report import Report
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace, open_workspace
from latentcache.scaleout.encoder import RayEncoder
from latentcache.scaleout.ray import RayCluster
from latentcache.types import Entry, Record

GOALS = {"fraction_of_encoders": 0.9, "gap_ms": 10.0, "nothing_s": 3.0}
BATCH_SIZE = 16
NUM_CPUS = 4
"""That Ray believes in: encoders that wait need none."""


class WaitingEncoder(RayEncoder):
    """Waits, and stores zeros. Encoders begin when all of them have started."""

    def _start(self) -> Workspace:
        workspace = open_workspace(self._config.cache)
        self._calls: list[tuple[float, float]] = []
        self._folder = Path(self._config.cache.path).parent
        (self._folder / f"started-{os.getpid()}").touch()
        while len(list(self._folder.glob("started-*"))) < int(self._config.ray.max_encoders):
            time.sleep(0.01)
        return workspace

    def _encode(
        self, tasks: list[Any], groups: dict[str, int], writer: Any, problems: dict[str, Any], made: set[str]
    ) -> Report:
        wait_s = float(self._config.cache.salt.partition(" ")[2])
        for number in sorted(set(groups.values())):
            begun = time.time()
            time.sleep(wait_s)
            for task in (task for task in tasks if groups[task.key] == number):
                record = Record(task.key, task.kind, task.identity.to_json(), {})
                writer.add(Entry(record, {"zeros": torch.zeros(4)}))
                made.add(task.key)
            if tasks[0].kind == "image":
                self._calls.append((begun, time.time()))
        (self._folder / f"calls-{os.getpid()}.json").write_text(json.dumps(self._calls))
        return Report()


class WaitingCluster(RayCluster):
    encoder = WaitingEncoder


def config_of(folder: Path, photos: Path, num_encoders: int, wait_s: float) -> Config:
    dataset = {
        "name": "photos",
        "source": {"path": str(photos)},
        "buckets": {"area": 64 * 64, "step": 32},
        "images": {"min_side": 8},
    }
    settings = {"num_gpus": 0, "num_cpus": 0.1, "max_encoders": num_encoders, "min_encoders": num_encoders}
    return parse_config(
        {
            "cache": {"path": str(folder / "cache"), "salt": f"wait {wait_s}"},
            "datasets": [dataset],
            "model": {"path": "tiny"},
            "encode": {"device": "cpu", "batch_size": BATCH_SIZE},
            "ray": settings,
        }
    )


def write_photos(folder: Path, number: int) -> Path:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(number)
    for photo in range(number):
        Image.fromarray(generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(folder / f"{photo}.png")
    return folder


def measured(folder: Path, photos: Path, num_encoders: int, wait_s: float) -> dict[str, Any]:
    """One run into a new cache, and the same run again."""
    folder.mkdir(parents=True)
    config = config_of(folder, photos, num_encoders, wait_s)
    cluster = WaitingCluster(config, "auto")
    report = run_precache(cluster.config, remote_encoders=cluster)
    assert report.num_encoded == report.num_misses and not report.refused, report.to_text()
    calls = [json.loads(path.read_text()) for path in folder.glob("calls-*.json")]
    everything = [call for each in calls for call in each]
    seconds = max(end for _, end in everything) - min(begin for begin, _ in everything)
    num_before = len(list(folder.glob("started-*")))
    begun = time.perf_counter()
    again = run_precache(cluster.config, remote_encoders=cluster)
    nothing_s = time.perf_counter() - begun
    assert again.num_misses == 0
    return {
        "batches_per_s": len(everything) / seconds,
        "gaps_ms": [1e3 * (after[0] - before[1]) for each in calls for before, after in pairwise(each)],
        "nothing_s": nothing_s,
        "num_started": len(list(folder.glob("started-*"))) - num_before,
    }


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    most, num_batches, wait_s = (2, 4, 0.2) if options.tiny else (8, 16, 1.0)
    datasets = {n: write_photos(folder / f"photos{n}", n * num_batches * BATCH_SIZE) for n in (1, most)}
    # No dashboard and no output of other processes, as the command has it.
    ray.init(num_cpus=NUM_CPUS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        measured(folder / "warm", datasets[1], 1, wait_s / 20)  # Ray starts processes ahead
        rounds: dict[int, list[dict[str, Any]]] = {1: [], most: []}
        for number in range(options.repetitions):
            for n, done in rounds.items():
                done.append(measured(folder / f"run{number}-{n}", datasets[n], n, wait_s))
    finally:
        ray.shutdown()
    rates = {n: [each["batches_per_s"] for each in done] for n, done in rounds.items()}
    gaps = sorted(gap for each in rounds[most] for gap in each["gaps_ms"])
    fractions = [many / one / most for many, one in zip(rates[most], rates[1], strict=True)]
    return {
        "goals": GOALS,
        "ray": ray.__version__,
        "num_encoders": most,
        "num_batches_each": num_batches,
        "wait_s": wait_s,
        "times_of_one": benchmarking.ratios(rates[most], rates[1]),
        "fraction_of_encoders": benchmarking.spread(fractions),
        "gap_ms": {
            "median": statistics.median(gaps),
            "p95": gaps[int(0.95 * (len(gaps) - 1))],
            "max": gaps[-1],
        },
        "nothing_s": benchmarking.spread([each["nothing_s"] for done in rounds.values() for each in done]),
        "num_started": sum(each["num_started"] for done in rounds.values() for each in done),
    }


def main() -> None:
    benchmarking.run_in_folder(run, benchmarking.parse(benchmarking.make_parser(__doc__)))


if __name__ == "__main__":
    main()
