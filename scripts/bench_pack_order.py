"""Pack order from a cold disk, against cat, random order, MosaicML streaming and litdata; and how well it shuffles.

    python scripts/bench_pack_order.py --peers PYTHON       # minutes, 11 GB of disk; PYTHON has streaming and litdata
    python scripts/bench_pack_order.py --peers PYTHON --shuffling    # how far neighbours in a pack come apart
    python scripts/bench_pack_order.py --json                  # one document; without --peers only our own ways
    python scripts/bench_pack_order.py --tiny                  # for correctness only

The samples are those of 1024x1024: mean latents, prompt_embeds and pooled_prompt_embeds in float16, 438.5 KiB, in packs
of images and packs of texts, as precache writes them. The peers have the same samples in files of 64 MiB, written by
their own writers, and read them with their own loaders, shuffled, in a process of their own that times itself. Before
each pass the files are dropped from the page cache, free memory is touched (`benchmarking_cold.take_back`), and the
cache is opened again, so digests are compared; the peers compare none. Whole epochs are read, but in random order
`num_random` samples. Everything is said of a sample: GB/s are those of the payload, and those of cat of all bytes of
the packs. The host of a virtual machine may still hold the files: trust the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from benchmarking import environment, in_turns, make_parser, parse, ratios, run_in_folder, seconds_of
from benchmarking_cold import cached_share, take_back
from benchmarking_samples import KINDS, write_manifest
from benchmarking_streams import BATCH, Values, number_of
from page_cache import drop

from latentcache import BucketBatchSampler, LatentDataset, LatentLoader
from latentcache.dataset.row_table import CaptionRef, ImageRef, Row
from latentcache.identity import key_of
from latentcache.loading.pack_order import WINDOW, Places
from latentcache.store import DiskStore
from latentcache.types import Bucket, Crop, Entry, Geometry, Record, Size

PEERS = ("mds", "litdata")
NUM_WORKERS = (0, 2)
LABELS = {
    "cat": "cat of the packs to /dev/null",
    "packs": 'LatentLoader, order="packs"',
    "random": 'LatentLoader, order="random"',
} | {f"{name}_{num}": f"{name}, num_workers={num}" for name in PEERS for num in NUM_WORKERS}
WANTED = {"of_cat": 0.6, "times_faster_than_peers": 1.0}


def make_cache(path: Path, values: Values, num_samples: int) -> None:
    """All images, then all captions."""
    rows: dict[str, Row] = {}
    size = Size(1024, 1024)

    def identity(kind: str, number: int) -> dict[str, Any]:
        return {"bench": kind, "number": number}

    def entries() -> Iterator[Entry]:
        for kind, names in KINDS.items():
            for number in range(num_samples):
                fields, of = values.sample(number), identity(kind, number)
                tensors = {name: torch.from_numpy(fields[name]) for name in names}
                yield Entry(Record(key_of(of), kind, of, {}), tensors)

    for number in range(num_samples):
        images = (ImageRef(key_of(identity("image", number)), Geometry(size, size, Crop(0, 0), size)),)
        captions = (CaptionRef(f"photo {number}", key_of(identity("text", number))),)
        rows[str(number)] = Row(str(number), str(number), None, images, captions)
    with DiskStore(path) as store:
        store.add(entries())
    write_manifest(path, rows)


class Cold:
    """The ways of reading a cache, each from dropped files. They return seconds a sample."""

    def __init__(self, folder: Path, values: Values, options: argparse.Namespace):
        self.folder, self.values, self.options = folder, values, options
        self.packs = sorted((folder / "cache" / "packs").glob("*/*"))
        self.shares: list[float] = []
        self.num_bytes = sum(path.stat().st_size for path in self.packs)

    def start(self, files: Sequence[Path]) -> None:
        drop(files)
        take_back(min(2 * self.num_bytes, 4 << 30))
        self.shares.append(cached_share(files[:64]))

    def cat(self, seed: int) -> float:
        self.start(self.packs)
        command = ["cat", *map(str, self.packs)]
        taken = seconds_of(lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True))
        return taken / int(self.options.num_samples)

    def ours(self, seed: int, *, num_read: int, **way: Any) -> float:
        drop(self.packs)
        dataset = LatentDataset(self.folder / "cache", **way)
        sampler = BucketBatchSampler(dataset, BATCH, seed=seed, window=self.options.window)
        numbers: list[int] = []
        with LatentLoader(sampler, device="cpu") as loader:
            sampler.set_epoch(seed)
            self.start(self.packs)

            def read() -> None:
                for batch in loader:
                    numbers.append(number_of(batch["latents"][0].numpy()))
                    assert str(numbers[-1]) == batch["sample_id"][0]
                    if len(numbers) * BATCH >= num_read:
                        break

            taken = seconds_of(read)
        dataset.cache.close()
        return taken / num_read

    def peer(self, seed: int, *, name: str, num_workers: int) -> float:
        files = [path for path in (self.folder / name).rglob("*") if path.is_file()]
        self.start(files)
        found = run_peer(self.options, "read", name, self.folder / name, num_workers=num_workers, seed=seed)
        assert found["is_right"] and found["num_samples"] == self.options.num_samples, found
        return float(found["seconds"] / self.options.num_samples)


def run_peer(options: argparse.Namespace, what: str, name: str, folder: Path, **more: int) -> dict[str, Any]:
    script = Path(__file__).with_name("benchmarking_streams.py")
    command = [str(options.peers), str(script), what, name, str(folder), *(["--tiny"] if options.tiny else [])]
    for key, value in more.items():
        command += [f"--{key}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def cold(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    values = Values(options.tiny)
    make_cache(folder / "cache", values, options.num_samples)
    for name in PEERS if options.peers else ():
        run_peer(options, "write", name, folder / name, num_samples=options.num_samples)
    ways = Cold(folder, values, options)
    whole, some = options.num_samples, min(options.num_samples, options.num_random)
    runs: dict[str, Callable[[int], float]] = {
        "cat": ways.cat,
        "packs": partial(ways.ours, num_read=whole, order="packs"),
        "random": partial(ways.ours, num_read=some),
    }
    for name in PEERS if options.peers else ():
        for num in NUM_WORKERS:
            runs[f"{name}_{num}"] = partial(ways.peer, name=name, num_workers=num)
    seeds = {name: iter(range(options.repetitions)) for name in runs}
    methods = {name: lambda name=name: runs[name](next(seeds[name])) for name in runs}
    seconds = in_turns(methods, options.repetitions, clock=lambda method: method())
    payload, in_packs = values.sample_bytes, ways.num_bytes / options.num_samples
    # Bytes a second against those of cat, which reads keys and records too.
    of_cat = {
        name: ratios([s * payload for s in seconds["cat"]], [s * in_packs for s in seconds[name]])
        for name in runs
        if name != "cat"
    }
    return {
        "us_per_sample": {name: statistics.median(taken) * 1e6 for name, taken in seconds.items()},
        "gb_per_s": {
            name: (in_packs if name == "cat" else payload) / statistics.median(taken) / 1e9
            for name, taken in seconds.items()
        },
        "of_cat": of_cat,
        "times_faster": {name: ratios(seconds[name], seconds["packs"]) for name in runs if name != "packs"},
        "num_packs": len(ways.packs),
        "cached_before": {"median": statistics.median(ways.shares), "max": max(ways.shares)},
        "wanted": WANTED,
        "pack_changes": pack_changes(folder / "cache", options.window),
    }


def pack_changes(path: Path, window: int) -> dict[str, Any]:
    """How often reading goes to another pack of captions while the packs of images are read one after the other."""
    dataset = LatentDataset(path, order="packs")
    store = dataset.cache.store
    assert isinstance(store, DiskStore)
    texts = [dataset.refs([number])[0].keys[1] for number in range(len(dataset))]
    image_places, text_places = dataset.places(), Places.of(store, texts)
    assert image_places is not None
    sampler = BucketBatchSampler(dataset, BATCH, window=window)
    num_changes, num_image_packs = 0, 0
    for batch in sampler.plan(0):
        for items in [batch.ahead] if batch.ahead else ():
            num_image_packs += len(set(image_places.packs[items].tolist()))
            num_changes += len(set(text_places.packs[items].tolist()))
    dataset.cache.close()
    num_texts = len(set(text_places.packs.tolist()))
    return {"num_image_packs": num_image_packs, "num_text_packs": num_texts, "num_text_packs_begun": num_changes}


class Numbers:
    """Items of one bucket, `num_per_pack` in a pack."""

    def __init__(self, num_items: int, num_per_pack: int, *, in_packs: bool):
        self.num_items, self.num_per_pack, self.in_packs = num_items, num_per_pack, in_packs

    def __len__(self) -> int:
        return self.num_items

    def bucket(self, index: int) -> Bucket:
        return Bucket(1024, 1024)

    def groups(self) -> np.ndarray:
        return np.zeros(self.num_items, np.int64)

    def identity(self) -> str:
        return ""

    def places(self) -> Places | None:
        numbers = np.arange(self.num_items)
        return Places(numbers // self.num_per_pack, numbers % self.num_per_pack, "") if self.in_packs else None

    def prefetch(self, items: Sequence[int]) -> None:
        """Nothing is read."""


def apart(order: np.ndarray, num_per_pack: int) -> dict[str, float]:
    """How far two samples that lie side by side in a file come apart, in samples; and how many packs a batch meets."""
    positions = np.empty(len(order), np.int64)
    positions[order] = np.arange(len(order))
    inside = np.arange(len(order) - 1) % num_per_pack != num_per_pack - 1
    distance = np.abs(np.diff(positions))[inside]
    batches = (order[: len(order) // BATCH * BATCH] // num_per_pack).reshape(-1, BATCH)
    packs = [len(set(batch)) for batch in batches.tolist()]
    same = (positions[:-1] // BATCH == positions[1:] // BATCH)[inside]
    return {
        "median": float(np.median(distance)),
        "mean": float(distance.mean()),
        "of_random": float(distance.mean() / (len(order) / 3)),
        "packs_in_a_batch": float(np.mean(packs)),
        "pairs_in_one_batch": float(same.mean()),
    }


def shuffling(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    num, per = options.num_shuffled, options.num_per_pack
    found = {}
    for name, in_packs in (("packs", True), ("random", False)):
        sampler = BucketBatchSampler(cast(Any, Numbers(num, per, in_packs=in_packs)), BATCH, window=options.window)
        found[name] = apart(np.array([item for batch in sampler for item in batch]), per)
    for name, per_file, more in (
        (
            ("py1e", options.num_per_file, {}),
            ("py1br", options.num_per_file, {}),
            ("py1e_same_memory", options.num_per_file, {"mixed": options.window * per}),
            ("py1br_same_memory", options.num_per_file, {"mixed": options.window * per}),
            *(
                (f"litdata_{num_workers}", options.num_per_file, {"num_workers": num_workers})
                for num_workers in (0, 2, 8)
            ),
        )
        if options.peers
        else ()
    ):
        algorithm = name.split("_", maxsplit=1)[0]
        place = folder / name
        place.mkdir()
        run_peer(options, "order", algorithm, place, num_samples=num, num_per_pack=per_file, **more)
        found[name] = apart(np.load(place / "order.npy"), per_file)
    return {"apart": found, "num_samples": num, "num_per_pack": per, "num_per_file": options.num_per_file}


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    measured = shuffling(folder, options) if options.shuffling else cold(folder, options)
    return measured | {"environment": environment(folder=folder)}


def to_text(result: Mapping[str, Any]) -> str:
    if "apart" in result:
        lines = [f"{'':22}{'median':>10}{'mean':>10}{'x random':>10}{'packs a batch':>15}{'pairs in a batch':>18}"]
        for name, each in result["apart"].items():
            lines.append(
                f"{name:22}{each['median']:10.0f}{each['mean']:10.0f}{each['of_random']:10.3f}"
                f"{each['packs_in_a_batch']:15.1f}{each['pairs_in_one_batch']:18.2%}"
            )
        return "\n".join(lines)
    lines = [f"{'cold':44}{'us/sample':>10}{'GB/s':>7}{'of cat':>22}{'packs is faster':>24}"]
    for name, value in result["us_per_sample"].items():
        of_cat, faster = (_spread(result[key].get(name)) for key in ("of_cat", "times_faster"))
        lines.append(f"{LABELS[name]:44}{value:10.1f}{result['gb_per_s'][name]:7.2f}{of_cat:>22}{faster:>24}")
    lines.append(f"wanted: {WANTED['of_cat']} of cat, and faster than the peers")
    lines.append(f"packs: {result['pack_changes']}")
    lines.append(
        f"of the files' pages were in the page cache before a pass: {result['cached_before']['max']:.1%} at most"
    )
    return "\n".join(lines)


def _spread(value: Mapping[str, float] | None) -> str:
    return "" if value is None else f"{value['median']:.2f} ({value['min']:.2f}..{value['max']:.2f})"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--num_samples", type=int, default=8000)
    parser.add_argument("--num_random", type=int, default=1024, help="samples read in random order in each pass")
    parser.add_argument("--window", type=int, help="packs that are mixed (default: 4 of the 16, with --shuffling 16)")
    parser.add_argument("--peers", type=Path, help="a Python that has mosaicml-streaming and litdata")
    parser.add_argument("--shuffling", action="store_true", help="how well it shuffles, instead of reading")
    parser.add_argument("--num_shuffled", type=int, default=200_000)
    parser.add_argument("--num_per_pack", type=int, default=512, help="images in a pack of 64 MiB")
    parser.add_argument("--num_per_file", type=int, default=149, help="whole samples in a file of 64 MiB")
    options = parse(parser)
    if options.tiny:
        options.num_samples, options.num_random, options.num_shuffled = 96, 32, 6400
        options.num_per_pack, options.num_per_file, options.window = 64, 20, options.window or 4
    options.window = options.window or (WINDOW if options.shuffling else 4)
    run_in_folder(run, options, to_text)


if __name__ == "__main__":
    main()
