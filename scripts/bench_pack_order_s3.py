"""Reading pack by pack from an object store, against obstore's own GETs of the same packs.

    python scripts/bench_pack_order_s3.py            # a table; some minutes, 10 GB of disk
    python scripts/bench_pack_order_s3.py --json     # one document
    python scripts/bench_pack_order_s3.py --tiny     # for correctness only

The object store is a real S3 server (Swift) on this machine, which shares its cores. The methods take turns, and each
reads a whole epoch: samples of 1024x1024 with their captions, 438.5 KiB. The GETs have as many packs on their way at
once as the store of a bucket, and keep nothing. Pack order compares digests, makes batches, and writes the packs to a
new local directory, from which the next epoch comes. Ratios are those of bytes a second; the goal is 0.85.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
from bench_pack_order import make_cache
from benchmarking import environment, in_turns, make_parser, parse, ratios, run_in_folder, seconds_of, spread
from benchmarking_streams import BATCH, Values, number_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.swift_server import SwiftServer, swift_serving

from latentcache import BucketBatchSampler, LatentDataset, LatentLoader
from latentcache.remote.fetched import NUM_THREADS
from latentcache.remote.transfers import transfer

BUCKET = "bench"
LABELS = {
    "gets": "obstore's GETs of the packs",
    "packs": 'LatentLoader, order="packs", a new local=',
}
WANTED_RATIO = 0.85


class Epochs:
    """Whole epochs from a bucket. Each method returns the seconds of one."""

    def __init__(self, folder: Path, options: argparse.Namespace, server: SwiftServer):
        self.folder, self.options = folder, options
        self.url, self.store = f"s3://{BUCKET}/cache", server.store(BUCKET)
        packs = sorted((folder / "cache").glob("packs/*/*.safetensors"))
        self.paths = [f"cache/packs/{path.stem[:2]}/{path.name}" for path in packs]
        self.num_bytes = sum(path.stat().st_size for path in packs)
        self._numbers = itertools.count()
        report = transfer(folder / "cache", self.url)
        assert report.ok and report.num_packs == len(packs), report.to_text()

    def gets(self) -> float:
        def get(path: str) -> int:
            return len(memoryview(obstore.get(self.store, path).bytes()))

        def all_of_them() -> None:
            with ThreadPoolExecutor(NUM_THREADS) as executor:
                assert sum(executor.map(get, self.paths)) == self.num_bytes

        return seconds_of(all_of_them)

    def packs(self) -> float:
        number = next(self._numbers)
        local = self.folder / f"local{number}"
        dataset = LatentDataset(self.url, order="packs", local=local)
        sampler = BucketBatchSampler(dataset, BATCH, seed=number, window=self.options.window)
        found: set[str] = set()

        def read() -> None:
            with LatentLoader(sampler, device="cpu") as loader:
                for batch in loader:
                    assert str(number_of(batch["latents"][0].numpy())) == batch["sample_id"][0]
                    found.update(batch["sample_id"])

        taken = seconds_of(read)
        assert len(found) == self.options.num_samples
        dataset.cache.close()
        shutil.rmtree(local)
        return taken


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    make_cache(folder / "cache", Values(options.tiny), options.num_samples)
    with swift_serving() as server:
        server.make_bucket(BUCKET)
        os.environ.update(server.environment())
        epochs = Epochs(folder, options, server)
        methods: dict[str, Callable[[], float]] = {
            "gets": epochs.gets,
            "packs": epochs.packs,
        }
        for method in methods.values():
            method()
        seconds = in_turns(methods, options.repetitions, clock=lambda method: method())
    return {
        "num_packs": len(epochs.paths),
        "num_bytes": epochs.num_bytes,
        "num_threads": NUM_THREADS,
        "seconds": {name: spread(taken) for name, taken in seconds.items()},
        "gb_per_s": {name: epochs.num_bytes / spread(taken)["median"] / 1e9 for name, taken in seconds.items()},
        "ratio": {name: ratios(seconds["gets"], taken) for name, taken in seconds.items()},
        "wanted_ratio": WANTED_RATIO,
        "environment": environment("cpu", folder) | {"obstore": obstore.__version__},
    }


def to_text(result: Mapping[str, Any]) -> str:
    lines = [
        f"{result['num_packs']} packs, {result['num_bytes']:,} bytes, {result['num_threads']} at once",
        f"{'':44}{'[s]':>8}{'GB/s':>8}{'of GETs':>10}{'min..max':>14}",
    ]
    for name, label in LABELS.items():
        ratio = result["ratio"][name]
        lines.append(
            f"{label:44}{result['seconds'][name]['median']:>8.3f}{result['gb_per_s'][name]:>8.2f}"
            f"{ratio['median']:>10.2f}{ratio['min']:>8.2f}..{ratio['max']:.2f}"
        )
    lines.append(f"wanted: at least {WANTED_RATIO} of the GETs")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--num_samples", type=int, default=6000)
    parser.add_argument("--window", type=int, default=4, help="packs that are mixed")
    options = parse(parser)
    if options.tiny:
        options.num_samples = 96
    run_in_folder(run, options, to_text)


if __name__ == "__main__":
    main()
