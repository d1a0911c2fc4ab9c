"""Several processes that add the same entries to one cache: each is encoded about once, and stored once.

First --n keys in another order in each of 8 processes, straight through the store: a process encodes what it could
claim, and looks again for the rest. Then as many runs of `precache` over one dataset, a fifth of the size, at once. In
the end DataLoader workers under fork, spawn and forkserver, and threads, read all of it.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soaking
import torch
from PIL import Image
from torch.utils.data import DataLoader, default_collate

from latentcache import BucketBatchSampler, DiskStore, LatentCache, LatentDataset, LoadedModels, run_precache
from latentcache.config import Config
from latentcache.config_file import parse_config
from latentcache.models.tiny import tiny_parts
from latentcache.store.pack import read_row
from latentcache.store.upkeep import verify

NUM_PROCESSES = 8
CHUNK = 8
ENCODE_S = 0.002
"""An entry takes so long to encode."""
MAX_ENCODES = 1.05
"""Encodes for each key, at most."""
SIDE = 64


def add_all(cache: str, numbers: Sequence[int], start: Any, num_encoded: Any, out: Any) -> None:
    """Add the entries of these numbers, in this order; encode only what this process claims."""
    torch.set_num_threads(1)
    failure = None
    try:
        with DiskStore(cache) as store:
            start.wait()
            with store.writer() as writer:
                left = {soaking.image_entry(number).record.key: number for number in numbers}
                while left:
                    for chunk in chunks(list(left), CHUNK):
                        mine, _ = writer.claim(chunk)
                        for key in chunk:
                            if key in mine:
                                time.sleep(ENCODE_S)
                                with num_encoded.get_lock():
                                    num_encoded.value += 1
                                writer.add(soaking.image_entry(left[key]))
                    writer.seal()
                    there = store.find(left)
                    left = {key: number for key, number in left.items() if key not in there}
    except Exception as error:
        failure = repr(error)
    out.put(failure)


def chunks(items: Sequence[str], size: int) -> Iterable[Sequence[str]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def precache_all(folder: str, start: Any, num_encoded: Any, out: Any) -> None:
    """A run of precache, with the tiny SDXL; each image that the VAE encodes is counted."""
    torch.set_num_threads(1)
    models = tiny_parts()

    def count(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        with num_encoded.get_lock():
            num_encoded.value += len(given[0])

    models["vae"].encoder.register_forward_pre_hook(count)
    failure: object = None
    try:
        start.wait()
        report = run_precache(config_of(Path(folder)), models=LoadedModels(**models))
        failure = report.refused or None
    except Exception as error:
        failure = repr(error)
    out.put(failure)


def config_of(folder: Path) -> Config:
    dataset = {
        "name": "train",
        "source": {"path": folder / "photos"},
        "buckets": {"area": SIDE * SIDE, "step": 32},
        "images": {"min_side": 8},
    }
    settings = {
        "cache": {"path": folder / "precache"},
        "datasets": [dataset],
        "model": {"path": "tiny"},
        "encode": {"device": "cpu", "num_workers": 1, "batch_size": 4},
    }
    return parse_config(settings)


def at_once(context: Any, goal: soaking.Goal, jobs: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> int:
    """Run the jobs at once; returns how many entries were encoded. Their errors are failures."""
    start, num_encoded, out = context.Event(), context.Value("q", 0), context.Queue()
    children = [context.Process(target=job, args=(*arguments, start, num_encoded, out)) for job, arguments in jobs]
    for child in children:
        child.start()
    time.sleep(1)
    start.set()
    for number in range(len(children)):
        with goal.case(f"process {number}"):
            failure = out.get(timeout=1200)
            if failure is not None:
                raise AssertionError(failure)
    for child in children:
        child.join()
    return int(num_encoded.value)


def check(goal: soaking.Goal, cache: Path, num_keys: int, num_encoded: int, kind: str) -> None:
    """One payload a key, at most 1.05 encodes a key, and all of it whole."""
    rows = [name for path in cache.glob("packs/*/*.safetensors") for name in read_row(path).names()]
    with DiskStore(cache, read_only=True) as store:
        wanted = [key for key in store.keys() if store.record(key).kind == kind]
    goal.n += num_keys
    goal.figures |= {"encodes a key": round(num_encoded / num_keys, 3), "payloads a key": len(rows) / len(set(rows))}
    if len(wanted) != num_keys:
        goal.fail(f"{len(wanted)} entries are there, {num_keys} were wanted")
    if len(rows) != len(set(rows)):
        goal.fail(f"{len(rows)} payloads of {len(set(rows))} keys were written")
    if num_encoded > MAX_ENCODES * num_keys:
        goal.fail(f"{num_encoded} encodes for {num_keys} keys; at most {MAX_ENCODES} a key are allowed")
    if not verify(cache).ok:
        goal.fail("verify finds damage")


def writers(soak: soaking.Soak, context: Any) -> None:
    goal = soak.goal(f"{NUM_PROCESSES} processes add the same keys in other orders: one payload and one encode a key")
    cache = soak.folder / "cache"
    orders = []
    for number in range(NUM_PROCESSES):
        order = list(range(soak.n))
        random.Random(f"{soak.options.seed} {number}").shuffle(order)
        orders.append((add_all, (str(cache), order)))
    num_encoded = at_once(context, goal, orders)
    check(goal, cache, soak.n, num_encoded, "image")


def precaches(soak: soaking.Soak, context: Any) -> None:
    goal = soak.goal(f"{NUM_PROCESSES} runs of precache over one dataset at once: one payload and one encode an image")
    photos = soak.folder / "photos"
    photos.mkdir()
    num_photos = max(NUM_PROCESSES, soak.n // 5)
    for number in range(num_photos):
        values = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(values).save(photos / f"{number}.png")
    num_encoded = at_once(context, goal, NUM_PROCESSES * [(precache_all, (str(soak.folder),))])
    check(goal, soak.folder / "precache", num_photos, num_encoded, "image")


# Readers -------------------------------------------------------------------------------------------------------------


def readers(soak: soaking.Soak) -> None:
    goal = soak.goal("DataLoader workers under fork, spawn, forkserver, and 16 threads: what they read is the same")
    path = soak.folder / "precache"
    dataset = LatentDataset(path, "train")
    sampler = BucketBatchSampler(dataset, 4, seed=soak.options.seed)
    expected = [
        soaking.batch_digest(dataset.place(default_collate(dataset.__getitems__(items)), device="cpu"))
        for items in sampler
    ]
    for method in ("fork", "spawn", "forkserver"):
        rounds = max(1, soak.n // (3 * len(expected)) // 4)
        loader = DataLoader(
            dataset, batch_sampler=sampler, num_workers=2, multiprocessing_context=method, persistent_workers=True
        )
        for number in range(rounds):
            sampler.set_epoch(0)
            with goal.case(f"{method} {number}"):
                found = [soaking.batch_digest(dataset.place(batch, device="cpu")) for batch in loader]
                assert found == expected, "a batch differs from that of a process without workers"
                goal.n += len(found) - 1
                goal.count(f"num_batches {method}", len(found))
        del loader
    with LatentCache(path) as cache:
        ids = cache.sample_ids()
        alone = {sample_id: soaking.batch_digest(cache.batch([sample_id], device="cpu")) for sample_id in ids}
        threads = [
            threading.Thread(target=read_in_thread, args=(cache, ids, alone, goal, seed, max(1, soak.n // 16)))
            for seed in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def read_in_thread(
    cache: LatentCache, ids: list[str], alone: dict[str, str], goal: soaking.Goal, seed: int, num: int
) -> None:
    dice = random.Random(seed)
    for _ in range(num):
        sample_id = dice.choice(ids)
        with goal.case(f"thread {seed}"):
            assert soaking.batch_digest(cache.batch([sample_id], device="cpu")) == alone[sample_id]
            goal.count("num_batches threads")


def program(soak: soaking.Soak) -> None:
    torch.set_num_threads(1)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["latentcache.precache.run", "latentcache.models.tiny", "soaking"])
    for name, part in (("store", writers), ("precache", precaches)):
        start = time.monotonic()
        part(soak, context)
        soak.say(f"{name}: {time.monotonic() - start:.0f} s")
    readers(soak)


def main() -> int:
    return soaking.run_soak(program, soaking.make_parser(__doc__, 1000, "keys"))


if __name__ == "__main__":
    sys.exit(main())
