"""Reading pack by pack from an object store, against obstore's own GETs of the same packs.

    python scripts/bench_pack_order_s3.py            # a table; some minutes, 10 GB of disk
    python scripts/bench_pack_order_s3.py --json     # one document
    python scripts/bench_pack_order_s3.py --tiny     # for correctness only

The object store is a real S3 server (Swift) on this machine, which shares its cores. The methods take turns, and each
reads a whole epoch: samples of 1024x1024 with their captions, 438.5 KiB. The GETs have as many packs on their way at
once as the store of a bucket, and keep nothing. Pack order writes the packs to a new local folder, compares digests and
makes batches. Ratios are those of bytes a second; the goal is 0.85.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
from bench_pack_order import make_cache
from benchmarking import make_parser, parse, run_in_folder, seconds_of
from benchmarking_buckets import BUCKET, WANTED_RATIO, measure, serving, table
from benchmarking_streams import BATCH, Values, number_of
from obstore.store import S3Store

from latentcache import BucketBatchSampler, LatentDataset, LatentLoader
from latentcache.config import CacheConfig
from latentcache.remote.tier import NUM_THREADS
from latentcache.remote.transfer import transfer

LABELS = {
    "gets": "obstore's GETs of the packs",
    "packs": 'LatentLoader, order="packs", a new local=',
}


class Epochs:
    """Whole epochs from a bucket. Each method returns the seconds of one."""

    def __init__(self, folder: Path, options: argparse.Namespace, store: S3Store):
        self.folder, self.options = folder, options
        self.url, self.store = f"s3://{BUCKET}/cache", store
        self.files = sorted((folder / "cache").glob("packs/*/*.safetensors"))
        self.paths = [f"cache/packs/{path.stem[:2]}/{path.name}" for path in self.files]
        self.num_bytes = sum(path.stat().st_size for path in self.files)
        self._numbers = itertools.count()
        report = transfer(folder / "cache", self.url)
        assert report.ok and report.num_packs == len(self.files), report.to_text()

    def gets(self) -> float:
        def get(path: str) -> int:
            return len(memoryview(obstore.get(self.store, path).bytes()))

        def all_of_them() -> None:
            with ThreadPoolExecutor(NUM_THREADS) as executor:
                assert sum(executor.map(get, self.paths)) == self.num_bytes

        return seconds_of(all_of_them)

    def packs(self) -> float:
        local = self.folder / "local"
        taken = self._epoch(local)
        shutil.rmtree(local)
        return taken

    def _epoch(self, local: Path) -> float:
        number = next(self._numbers)
        dataset = LatentDataset(CacheConfig(path=self.url, local=local), order="packs")
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
        return taken


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    make_cache(folder / "cache", Values(options.tiny), options.num_samples)
    with serving() as store:
        epochs = Epochs(folder, options, store)
        methods: dict[str, Callable[[], float]] = {
            "gets": epochs.gets,
            "packs": epochs.packs,
        }
        return measure(methods, dict.fromkeys(methods, "gets"), epochs.files, NUM_THREADS, options)


def to_text(result: Mapping[str, Any]) -> str:
    return "\n".join([*table(result, LABELS), f"wanted: at least {WANTED_RATIO} of the GETs"])


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
