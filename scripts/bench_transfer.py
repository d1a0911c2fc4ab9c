"""What push and pull add to moving the same bytes: against obstore's own PUTs and GETs of the same packs.

    python scripts/bench_transfer.py            # a table; a few minutes, 3 GB of disk
    python scripts/bench_transfer.py --json     # one document
    python scripts/bench_transfer.py --tiny     # for correctness only

The object store is a real S3 server (Swift) on this machine, which shares its cores. All methods have as many packs on
their way at once, and take turns: each moves all packs in each round, to a place that is empty. `push` compares every
entry with its digest before it sends it, and `pull` before it is stored, durably; the GETs keep what came in memory,
or write it to files and sync these. Ratios are those of the bytes a second of a round; the goal is 0.85.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import obstore
from bench_loader import make_cache
from benchmarking import make_parser, parse, run_in_folder, seconds_of
from benchmarking_buckets import BUCKET, WANTED_RATIO, measure, serving, table
from obstore.store import S3Store

from latentcache.remote.transfer import NUM_THREADS, TransferReport, transfer

METHODS = {
    "puts": ("obstore's PUTs of the files", "puts"),
    "push": ("latentcache push", "puts"),
    "gets": ("obstore's GETs, kept in memory", "gets"),
    "gets_to_files": ("obstore's GETs, written to files and synced", "gets"),
    "pull": ("latentcache pull", "gets"),
}
"""Label, and what it is compared with."""


def at_once(function: Callable[[Path], Any], packs: Iterable[Path]) -> None:
    with ThreadPoolExecutor(NUM_THREADS) as executor:
        for _ in executor.map(function, packs):
            pass


class Rounds:
    """Moves the packs of a cache, to a new place each time. Each method returns the seconds of the moving alone."""

    def __init__(self, folder: Path, cache: Path, store: S3Store):
        self.folder, self.cache, self.store = folder, cache, store
        self.packs = sorted(cache.glob("packs/*/*.safetensors"))
        self._numbers = itertools.count()
        self._full = f"s3://{BUCKET}/full"
        self._whole(transfer(cache, self._full))

    def _whole(self, report: TransferReport) -> None:
        assert report.ok and report.num_packs == len(self.packs) and report.manifests, report.to_text()

    def _uploaded(self, upload: Callable[[str], Any]) -> float:
        prefix = f"round{next(self._numbers)}"
        taken = seconds_of(partial(upload, prefix))
        for each in [each for chunk in obstore.list(self.store, prefix) for each in chunk]:
            obstore.delete(self.store, each["path"])
        return taken

    def puts(self) -> float:
        def upload(prefix: str) -> None:
            at_once(
                lambda path: obstore.put(self.store, f"{prefix}/{path.name}", path, use_multipart=False), self.packs
            )

        return self._uploaded(upload)

    def push(self) -> float:
        return self._uploaded(lambda prefix: self._whole(transfer(self.cache, f"s3://{BUCKET}/{prefix}")))

    def _get(self, path: Path) -> memoryview:
        return memoryview(obstore.get(self.store, f"full/packs/{path.stem[:2]}/{path.name}").bytes())

    def gets(self) -> float:
        return seconds_of(lambda: at_once(self._get, self.packs))

    def _downloaded(self, download: Callable[[Path], Any]) -> float:
        target = self.folder / f"round{next(self._numbers)}"
        taken = seconds_of(partial(download, target))
        shutil.rmtree(target)
        return taken

    def gets_to_files(self) -> float:
        def download(target: Path) -> None:
            target.mkdir()
            at_once(partial(self._get_to_file, target), self.packs)

        return self._downloaded(download)

    def _get_to_file(self, target: Path, path: Path) -> None:
        data = self._get(path)
        with (target / path.name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def pull(self) -> float:
        return self._downloaded(lambda target: self._whole(transfer(self._full, target)))


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    cache = folder / "cache"
    make_cache(cache, options.num_samples, options.scale)
    with serving() as store:
        rounds = Rounds(folder, cache, store)
        methods: dict[str, Callable[[], float]] = {name: getattr(rounds, name) for name in METHODS}
        compared_with = {name: other for name, (_, other) in METHODS.items()}
        return measure(methods, compared_with, rounds.packs, NUM_THREADS, options)


def to_text(result: Mapping[str, Any]) -> str:
    lines = table(result, {name: label for name, (label, _) in METHODS.items()})
    return "\n".join([*lines, f"wanted: push of PUTs, and pull of GETs, at least {WANTED_RATIO}"])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--num_samples", type=int, default=1024)
    options = parse(parser)
    options.scale = 1
    if options.tiny:
        options.scale, options.num_samples = 16, 16
    run_in_folder(run, options, to_text)


if __name__ == "__main__":
    main()
