"""How long a batch takes to come back: against a copy from memory, against the disk, and against trainers' files.

    python scripts/bench_read.py                   # all parts; minutes, 15 GB of disk, as much of page cache
    python scripts/bench_read.py --part warm       # one part
    python scripts/bench_read.py --json            # one document
    python scripts/bench_read.py --tiny            # for correctness only

The samples are those of 1024x1024: mean latents, prompt_embeds and pooled_prompt_embeds in float16, 438.5 KiB. Orders
are random, a new one in each round, and what is read is compared with what was stored. Peers keep a file of latents and
a file of text embeddings for each sample, as kohya's sd-scripts, SimpleTuner, ai-toolkit and OneTrainer do.

warm       each pass comes directly after an untimed one over the same samples. The limit copies the same rows in the
           same order, in one thread, from anonymous memory into tensors that are there already. The first epoch, in
           which each entry is compared with its digest, is timed apart. A pass at the memory's pace takes some 20 ms,
           in which a virtual machine is often disturbed, so there are five times as many rounds of them
cold       before each pass the files are dropped from the page cache, free memory is touched (`take_back` says why),
           and the cache is opened again, so digests are compared too. `preadv` reads as many ranges of these sizes, at
           random places of the same packs, with the read-ahead that the system does by itself
ragged     warm batches of captions of natural length, as Qwen-Image's: padded to the longest of each batch, and so is
           what the limit copies
packs      pack order, cold, over a whole epoch, against `cat` of the packs to /dev/null and against random order

The host of a virtual machine may still hold files that were dropped: trust the ratios.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarking import (
    FILE_FORMATS,
    SHAPES,
    TINY_SHAPES,
    Tensors,
    in_turns,
    make_parser,
    parse,
    pickling_diskcache,
    ratios,
    run_parts,
    seconds_of,
    write_cache,
)

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader
from latentcache.families import family_named
from latentcache.store.entry import as_array

BATCH = 16
PEERS = (*FILE_FORMATS, "diskcache_pickle")
NUM_REPEATED = 256
"""Values of which samples of the cold parts are made: how many there are says how much memory is needed."""
ROUNDS_AT_PACE = 5
"""How many times as many rounds what reads at the memory's pace gets."""
WANTED = {
    "ratio_to_limit": {"4": 2.0, "16": 1.35, "64": 1.25},
    "times_faster": {"torch_load": 15, "npz": 15, "safetensors_file": 5, "diskcache_pickle": 10},
    "cold_times_faster_than_torch_load": 3,
    "ragged_ratio_to_limit": 1.25,
    "of_cat": 0.6,
}

Batches = Sequence[Sequence[int]]
Method = Callable[[Batches], None]


class Samples:
    """The values: for each field a tensor [n, *shape]. Sample `number` has row `number % n`."""

    def __init__(self, num_samples: int, num_values: int, *, tiny: bool):
        self.num_samples = num_samples
        self.shapes = TINY_SHAPES if tiny else SHAPES
        generator = torch.Generator().manual_seed(0)
        self.fields = {
            name: torch.empty((num_values, *shape), dtype=torch.float16).normal_(generator=generator)
            for shapes in self.shapes.values()
            for name, shape in shapes.items()
        }
        self.rows = {name: list(as_rows(field)) for name, field in self.fields.items()}

    @property
    def row_bytes(self) -> int:
        return sum(rows[0].nbytes for rows in self.rows.values())

    def values(self, number: int) -> dict[str, dict[str, torch.Tensor]]:
        """Tensors by kind. They are copies: of a view, all that it is a view of would be saved."""
        row = number % len(next(iter(self.fields.values())))
        return {kind: {name: self.fields[name][row].clone() for name in names} for kind, names in self.shapes.items()}

    def check(self, batch: Mapping[str, Any]) -> None:
        """A benchmark of wrong values is worth nothing."""
        for name, field in self.fields.items():
            assert torch.equal(batch[name], field[[int(each) % len(field) for each in batch["sample_id"]]]), name


class Rounds:
    """The samples of each round, the same for all methods: random ones, none twice, in whole batches."""

    def __init__(self, num_samples: int, num_read: int, num_rounds: int):
        source = random.Random(1)
        self.orders = [source.sample(range(num_samples), num_read) for _ in range(num_rounds)]

    def batches(self, number: int, batch_size: int = BATCH) -> Batches:
        order = self.orders[number]
        return [order[at : at + batch_size] for at in range(0, len(order), batch_size)]

    def warm(self, ways: Mapping[str, Method], batch_size: int = BATCH) -> dict[str, list[float]]:
        """Seconds of each way in each round, directly after an untimed pass over the same samples."""

        def method(read: Method) -> Callable[[], None]:
            numbers = iter([number for number in range(len(self.orders)) for _ in range(2)])
            return lambda: read(self.batches(next(numbers), batch_size))

        return in_turns({name: method(read) for name, read in ways.items()}, len(self.orders), warm=True)


def as_rows(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy().reshape(len(tensor), -1)


def limit(samples: Samples, batch_size: int) -> Method:
    # Zeros are not touched yet: the untimed pass does it.
    fields = [(np.zeros((batch_size, rows[0].nbytes), np.uint8), rows) for rows in samples.rows.values()]

    def read(batches: Batches) -> None:
        for numbers in batches:
            for target, rows in fields:
                for place, number in enumerate(numbers):
                    target[place] = rows[number]

    return read


def ours(cache: LatentCache) -> Method:
    def read(batches: Batches) -> None:
        for numbers in batches:
            cache.batch([str(number) for number in numbers], device="cpu")

    return read


def items_of(dataset: LatentDataset) -> Method:
    """What a DataLoader calls, without its collate."""

    def read(batches: Batches) -> None:
        for numbers in batches:
            dataset.__getitems__(numbers)

    return read


def loader(dataset: LatentDataset, batch_size: int, check: Callable[[Mapping[str, Any]], None]) -> Method:
    """Batches in the sampler's own order, without prefetch, each checked once."""
    made = LatentLoader(BucketBatchSampler(dataset, batch_size, drop_last=True), device="cpu", prefetch=0)
    batches = made.forever()
    for _ in range(2 * len(made)):
        check(next(batches))

    def read(wanted: Batches) -> None:
        for _ in wanted:
            next(batches)

    return read


def make_peers(folder: Path, samples: Samples, names: Iterable[str]) -> dict[str, Method]:
    """The samples as peers keep them, a file (or a value) of latents and one of text embeddings; what reads them."""
    ways: dict[str, Method] = {}
    for name in names:
        place = folder / name
        place.mkdir()
        save: Callable[[Tensors, Any], Any]
        if name == "diskcache_pickle":
            cache = pickling_diskcache(place)
            suffix, save, load = "", partial(put, cache), cache.__getitem__
        else:
            suffix, save, load = FILE_FORMATS[name]
        keys = [[f"{number}.{kind}{suffix}" for kind in samples.shapes] for number in range(samples.num_samples)]
        places: list[list[Any]] = [[place / key if suffix else key for key in row] for row in keys]
        for number, row in enumerate(places):
            for values, where in zip(samples.values(number).values(), row, strict=True):
                save(values, where)
        ways[name] = partial(stack, load, places)
    return ways


def put(cache: Any, values: Tensors, key: Any) -> None:
    cache[key] = values


def stack(load: Callable[[Any], Tensors], places: Sequence[Sequence[Any]], batches: Batches) -> None:
    """Read samples one by one, and stack them."""
    for numbers in batches:
        loaded = [{name: value for at in places[number] for name, value in load(at).items()} for number in numbers]
        for name in loaded[0]:
            torch.stack([tensors[name] for tensors in loaded])


def packs_of(cache: Path) -> list[Path]:
    return sorted((cache / "packs").glob("*/*"))


def us_per_sample(seconds: Mapping[str, Sequence[float]], num_read: int) -> dict[str, float]:
    return {name: statistics.median(values) / num_read * 1e6 for name, values in seconds.items()}


# Warm -----------------------------------------------------------------------------------------------------------------


def warm(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    samples = Samples(options.num_samples, options.num_samples, tiny=options.tiny)
    write_cache(folder / "cache", samples.num_samples, samples.values)
    peers = make_peers(folder, samples, PEERS)
    dataset = LatentDataset(folder / "cache")
    result: dict[str, Any] = {
        "sample_bytes": samples.row_bytes,
        "first_epoch": first_epoch(folder / "cache", dataset.cache, samples),
    }
    ratio: dict[str, dict[str, Any]] = {"batch": {}, "loader": {}, "dataset": {}}
    times: dict[str, dict[str, float]] = {}
    for size in options.batch_sizes:
        ways = {
            "limit": limit(samples, size),
            "batch": ours(dataset.cache),
            "loader": loader(dataset, size, samples.check),
            "dataset": items_of(dataset),
        }
        num_rounds = options.repetitions * (1 if options.tiny else ROUNDS_AT_PACE)
        seconds = Rounds(samples.num_samples, options.num_read, num_rounds).warm(ways, size)
        times[str(size)] = us_per_sample(seconds, options.num_read)
        for name, found in ratio.items():
            found[str(size)] = ratios(seconds[name], seconds["limit"])
    rounds = Rounds(samples.num_samples, options.num_read, options.repetitions)
    seconds = rounds.warm({"limit": limit(samples, BATCH), "ours": ours(dataset.cache)} | peers)
    times["beside_peers"] = us_per_sample(seconds, options.num_read)
    dataset.cache.close()
    return result | {
        "ratio_to_limit": ratio,
        "times_faster": {name: ratios(seconds[name], seconds["ours"]) for name in PEERS},
        "times_faster_limit": {name: ratios(seconds[name], seconds["limit"]) for name in PEERS},
        "us_per_sample": times,
        "wanted": {name: WANTED[name] for name in ("ratio_to_limit", "times_faster")},
    }


def first_epoch(path: Path, cache: LatentCache, samples: Samples) -> dict[str, float]:
    """The epoch in which every entry is compared with its digest. The page cache is warm, as for the limit."""
    num_read = samples.num_samples // BATCH * BATCH
    batches = Rounds(samples.num_samples, num_read, 1).batches(0)
    for file in packs_of(path):
        file.read_bytes()
    read = limit(samples, BATCH)
    read(batches)
    limit_s, first_s = (seconds_of(partial(method, batches)) for method in (read, ours(cache)))
    for numbers in batches:
        samples.check(cache.batch([str(number) for number in numbers], device="cpu"))
    return {"us_per_sample": first_s / num_read * 1e6, "ratio_to_limit": first_s / limit_s}


# Cold -----------------------------------------------------------------------------------------------------------------


def drop(paths: Iterable[Path]) -> None:
    """Drop files from the page cache. They must not be mapped."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(paths: Iterable[Path]) -> float:
    """The share of the pages of some files that lie in the page cache. OSError where the system does not say.

    `mincore` says it without reading: a read with RWF_NOWAIT begins to read what is not there, and sometimes finds it.
    """
    shares = []
    for path in paths:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            pages = np.zeros(-(-len(memory) // mmap.PAGESIZE), np.uint8)
            start = ctypes.c_void_p(np.frombuffer(memory, np.uint8).ctypes.data)
            mincore = ctypes.CDLL(None, use_errno=True).mincore
            if mincore(start, ctypes.c_size_t(len(memory)), ctypes.c_void_p(pages.ctypes.data)):
                raise OSError(ctypes.get_errno(), "mincore failed", str(path))
        shares.append(pages & 1)
    return float(np.concatenate(shares).mean())


def take_back(num_bytes: int) -> None:
    """Touch so many bytes of free memory, and free them again.

    Why: the host of a virtual machine takes free memory back after a while, and each page of it costs a fault when it
    is used again. On bare metal it does not go away.
    """
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for offset in range(0, num_bytes, mmap.PAGESIZE):
            memory[offset] = 1


class Cold:
    """Ways of reading a cache, each pass over files that were dropped. They return the seconds of a pass."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        self.folder, self.path, self.options = folder, folder / "cache", options
        self.samples = Samples(options.num_samples, min(NUM_REPEATED, options.num_samples), tiny=options.tiny)
        write_cache(self.path, options.num_samples, self.samples.values)
        self.packs = packs_of(self.path)
        self.num_bytes = sum(path.stat().st_size for path in self.packs)
        self.rounds = Rounds(options.num_samples, options.num_read, options.repetitions)
        self.shares: list[float] = []

    def timed(self, files: Sequence[Path], read: Callable[[], Any]) -> float:
        drop(files)
        take_back(2 * self.options.num_read * self.samples.row_bytes)  # for the page cache, and for what is made of it
        self.shares.append(cached_share(files[:64]))
        return seconds_of(read)

    def batch(self, number: int) -> float:
        drop(self.packs)  # before they are mapped
        with LatentCache(self.path) as cache:
            cache.sample_ids()
            batches = self.rounds.batches(number)
            taken = self.timed(self.packs, lambda: ours(cache)(batches))
            self.samples.check(cache.batch([str(each) for each in batches[-1]], device="cpu"))
        return taken

    def loader(self, number: int, num_read: int, order: Any = "random") -> float:
        drop(self.packs)
        dataset = LatentDataset(self.path, order=order)
        sampler = BucketBatchSampler(dataset, BATCH, seed=number, window=self.options.window)
        last: dict[str, Any] = {}
        with LatentLoader(sampler, device="cpu") as made:

            def read() -> None:
                for at, batch in enumerate(made, 1):
                    last.update(batch)
                    if at * BATCH >= num_read:
                        break

            taken = self.timed(self.packs, read)
        self.samples.check(last)
        dataset.cache.close()
        return taken

    def preadv(self, number: int) -> float:
        source = random.Random(number)
        files = [os.open(path, os.O_RDONLY) for path in self.packs]
        sizes = [sum(self.samples.rows[name][0].nbytes for name in names) for names in self.samples.shapes.values()]
        ranges = []
        for _ in range(self.options.num_read):
            for size in sizes:
                fd = source.choice(files)
                ranges.append((fd, source.randrange(max(1, os.fstat(fd).st_size - size)), memoryview(bytearray(size))))
        taken = self.timed(self.packs, lambda: [os.preadv(fd, [out], offset) for fd, offset, out in ranges])
        for fd in files:
            os.close(fd)
        return taken

    def peer(self, files: Sequence[Path], read: Method, number: int) -> float:
        return self.timed(files, partial(read, self.rounds.batches(number)))

    def cat(self) -> float:
        command = ["cat", *map(str, self.packs)]
        return self.timed(self.packs, lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True))

    def measure(self, runs: Mapping[str, Callable[[int], float]]) -> dict[str, list[float]]:
        """Seconds of each way in each round, which has a number."""
        numbers = {name: iter(range(self.options.repetitions)) for name in runs}
        methods = {name: lambda name=name: runs[name](next(numbers[name])) for name in runs}
        return in_turns(methods, self.options.repetitions, clock=lambda method: method())


def cold(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    ways = Cold(folder, options)
    peers = make_peers(folder, ways.samples, ["torch_load", "safetensors_file"])
    files = {name: sorted((folder / name).iterdir()) for name in peers}
    runs: dict[str, Callable[[int], float]] = {
        "batch": ways.batch,
        "loader": partial(ways.loader, num_read=options.num_read),
        "preadv": ways.preadv,
    }
    for name, read in peers.items():
        runs[name] = partial(ways.peer, files[name], read)
    seconds = ways.measure(runs)
    return {
        "ratio_to_preadv": {name: ratios(seconds[name], seconds["preadv"]) for name in ("batch", "loader")},
        "times_faster": {
            way: {name: ratios(seconds[name], seconds[way]) for name in peers} for way in ("batch", "loader")
        },
        "us_per_sample": us_per_sample(seconds, options.num_read),
        "cached_before_at_most": max(ways.shares),
        "wanted": {"times_faster_than_torch_load": WANTED["cold_times_faster_than_torch_load"]},
    }


def packs(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    ways, num_samples, num_read = Cold(folder, options), options.num_samples, options.num_read
    seconds = ways.measure(
        {
            "cat": lambda number: ways.cat() / num_samples,
            "packs": lambda number: ways.loader(number, num_samples, "packs") / num_samples,
            "random": lambda number: ways.loader(number, num_read) / num_read,
        }
    )
    # Bytes a second against those of cat, which reads keys and records too.
    payload, in_packs = ways.samples.row_bytes, ways.num_bytes / num_samples
    return {
        "of_cat": {
            name: ratios([s * payload for s in seconds["cat"]], [s * in_packs for s in seconds[name]])
            for name in ("packs", "random")
        },
        "times_faster_than_random": ratios(seconds["random"], seconds["packs"]),
        "us_per_sample": us_per_sample(seconds, 1),
        "num_packs": len(ways.packs),
        "cached_before_at_most": max(ways.shares),
        "wanted": {"of_cat": WANTED["of_cat"]},
    }


# Captions of natural length -------------------------------------------------------------------------------------------


def ragged(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    shape, width, lengths = (
        ((4, 1, 8, 8), 16, range(2, 9)) if options.tiny else ((16, 1, 128, 128), 3584, range(20, 81))
    )
    num_samples = 64 if options.tiny else 512
    num_read, source = num_samples // BATCH * BATCH, random.Random(0)
    num_rows = [source.choice(lengths) for _ in range(num_samples)]
    generator = torch.Generator().manual_seed(0)
    latents = torch.empty((num_samples, *shape), dtype=torch.float16).normal_(generator=generator)
    texts = torch.zeros((num_samples, lengths[-1], width), dtype=torch.bfloat16)
    for number, length in enumerate(num_rows):
        texts[number, :length] = torch.randn((length, width), generator=generator)

    def values(number: int) -> dict[str, dict[str, torch.Tensor]]:
        return {
            "image": {"latents": latents[number]},
            "text": {"prompt_embeds": texts[number, : num_rows[number]]},
        }

    def check(batch: Mapping[str, Any]) -> None:
        numbers = [int(each) for each in batch["sample_id"]]
        longest = max(num_rows[number] for number in numbers)
        assert torch.equal(batch["latents"], latents[numbers])
        assert torch.equal(batch["prompt_embeds"], texts[numbers, :longest])
        assert batch["prompt_embeds_mask"].sum(1).tolist() == [num_rows[number] for number in numbers]

    sources = (as_array(latents), as_array(texts))
    memory = tuple(np.zeros((BATCH, *values.shape[1:]), values.dtype) for values in sources)

    def copy(batches: Batches) -> None:
        for numbers in batches:
            longest = max(num_rows[number] for number in numbers)
            targets = (memory[0], memory[1].reshape(-1)[: BATCH * longest * width].reshape(BATCH, longest, width))
            for place, number in enumerate(numbers):
                np.copyto(targets[0][place], sources[0][number])
                np.copyto(targets[1][place], sources[1][number, :longest])

    common = {
        "schema": 1,
        "salt": "",
        "family": "qwen-image",
        "text_encoding": family_named("qwen-image").text_recipe(),
        "image_encoding": {"scaling_factor": 1.0, "shift_factor": None},
    }
    write_cache(folder / "cache", num_samples, values, ragged=frozenset({"prompt_embeds"}), common=common)
    dataset = LatentDataset(folder / "cache")
    rounds = Rounds(num_samples, num_read, options.repetitions * (1 if options.tiny else 3))
    for numbers in rounds.batches(0):
        check(dataset.cache.batch([str(each) for each in numbers], device="cpu"))
    ways = {"limit": copy, "batch": ours(dataset.cache), "loader": loader(dataset, BATCH, check)}
    seconds = rounds.warm(ways)
    dataset.cache.close()
    padded = [
        max(num_rows[each] for each in numbers)
        for number in range(len(rounds.orders))
        for numbers in rounds.batches(number)
    ]
    return {
        "ratio_to_limit": {name: ratios(seconds[name], seconds["limit"]) for name in ("batch", "loader")},
        "us_per_sample": us_per_sample(seconds, num_read),
        "mean_rows": statistics.mean(num_rows),
        "mean_rows_padded": statistics.mean(padded),
        "wanted": {"ratio_to_limit": WANTED["ragged_ratio_to_limit"]},
    }


PARTS = {"warm": warm, "cold": cold, "ragged": ragged, "packs": packs}


def main() -> None:
    parser = make_parser(__doc__, PARTS)
    parser.add_argument("--num_samples", type=int, default=4000)
    parser.add_argument("--window", type=int, default=4, help="packs that pack order mixes (default: %(default)s)")
    options = parse(parser)
    options.num_read, options.batch_sizes = 1024, [4, 16, 64]
    if options.tiny:
        options.num_samples, options.num_read, options.batch_sizes = 96, 32, [4, 16]
    torch.set_num_threads(1)  # as the limit's copy
    run_parts(PARTS, options)


if __name__ == "__main__":
    main()
