"""Concurrent use of one cache by many processes, for a long time.

    python scripts/soak_load.py                           # all parts: 40 minutes
    python scripts/soak_load.py --part mixed --n 600

writers  8 runs of `precache` at once over one dataset of --n images
mixed    two trainers, a precacher, `verify`, `prune` and `compact` on one cache, for --n seconds. First a trainer runs
         alone; its rate and the digest of each batch are the reference for the two. A training step sleeps, as the host
         does while a device works. The precacher changes, adds and removes images of a second dataset, encodes them and
         reads everything back. Each runs in a loop. A StoreBusyError is retried; any other error is a failure
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from soaking import Goal, Soak, config_of, digest_of, run_soak, say, write_photo

from latentcache import (
    BucketBatchSampler,
    DiskStore,
    LatentCache,
    LatentDataset,
    LatentLoader,
    LoadedModels,
    run_precache,
)
from latentcache.dataset.manifest_folder import ManifestFolder, keys_in_use
from latentcache.errors import StoreBusyError
from latentcache.models.tiny import tiny_parts
from latentcache.store.pack import read_row
from latentcache.store.upkeep import compact, prune, verify

NUM_PROCESSES = 8
START_S = 2.0
"""All processes start working after this many seconds."""
MAX_ENCODES = 1.05
"""Upper bound for encodes per image."""
NUM_PHOTOS, NUM_CHANGING = 96, 40
NUM_EPOCHS = 3
"""Distinct epochs. They repeat, so that every batch has a reference digest."""
BATCH_SIZE = 4
STEP_S = 0.1
MIN_RATE, MIN_RATE_S = 0.95, 120
"""Lowest accepted rate of a trainer relative to running alone, and the shortest run for which it is checked."""
PAUSE_S = 0.5
"""Pause between runs. It is twelve times as long for precache, which blocks the others: `prune` has work once both
trainers have opened the cache since the last change of a manifest, and an epoch takes 2.4 seconds."""


def together(goal: Goal, jobs: Sequence[Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Run each job in its own process. Returns their results; an exception or a dead process is a failure."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["latentcache.precache.run", "latentcache.models.tiny"])
    found = []
    with ProcessPoolExecutor(len(jobs), context, torch.set_num_threads, (1,)) as pool:
        for number, future in enumerate([pool.submit(job) for job in jobs]):
            with goal.case(f"process {number}"):
                found.append(future.result())
    return found


# Writers --------------------------------------------------------------------------------------------------------------


def precache_all(folder: Path, start: float) -> dict[str, Any]:
    """Run precache with the tiny SDXL, counting the images that its VAE encodes."""
    models, sizes = tiny_parts(), list[int]()
    models["vae"].encoder.register_forward_pre_hook(lambda module, given: sizes.append(len(given[0])))
    time.sleep(max(0.0, start - time.time()))
    report = run_precache(config_of(folder / "cache", "train", folder / "train"), models=LoadedModels(**models))
    assert not report.refused, report.refused
    return {"num_encoded": sum(sizes)}


def writers(soak: Soak) -> None:
    goal = soak.goal(f"{NUM_PROCESSES} runs of precache over one dataset at once: one payload and one encode an image")
    for number in range(soak.n):
        write_photo(soak.folder / "train" / f"{number}.png", number)
    jobs = [partial(precache_all, soak.folder, time.time() + START_S)] * NUM_PROCESSES
    num_encoded, cache = sum(each["num_encoded"] for each in together(goal, jobs)), soak.folder / "cache"
    rows = [name for path in cache.glob("packs/*/*.safetensors") for name in read_row(path).names()]
    with DiskStore(cache, read_only=True) as store:
        num_found = sum(store.record(key).kind == "image" for key in store.keys())
    goal.figures |= {"encodes an image": round(num_encoded / soak.n, 3), "payloads a key": len(rows) / len(set(rows))}
    with goal.case("all images are there"):
        goal.n += soak.n - 1
        assert num_found == soak.n, f"{num_found} images are there, {soak.n} were wanted"
    with goal.case("one payload a key"):
        assert len(rows) == len(set(rows)), f"{len(rows)} payloads of {len(set(rows))} keys were written"
    with goal.case("one encode an image"):
        assert num_encoded <= MAX_ENCODES * soak.n, f"{num_encoded} encodes of {soak.n} images"
    with goal.case("no damage"):
        find_no_damage(cache)


# Everything at once ---------------------------------------------------------------------------------------------------


def batches(cache: Path, seed: int) -> Iterator[tuple[str, str]]:
    """The epoch and number of each batch with its digest. The cache is opened for each epoch."""
    for epoch in range(NUM_EPOCHS):
        dataset = LatentDataset(cache, "train", caption="random")
        with dataset.cache:
            sampler = BucketBatchSampler(dataset, BATCH_SIZE, seed=seed)
            sampler.set_epoch(epoch)
            for number, batch in enumerate(LatentLoader(sampler, device="cpu", scaled=True)):
                yield f"{epoch}/{number}", digest_of(batch)


def train(cache: Path, seed: int, until: float, expected: dict[str, str] | None = None) -> dict[str, Any]:
    """Train until the given time. Without `expected` (the reference run) at least all epochs once."""
    found: dict[str, str] = {}
    num_steps, start = 0, 0.0
    while num_steps == 0 or time.time() < until:
        for name, digest in batches(cache, seed):
            start = start or time.monotonic()  # excludes opening the cache
            time.sleep(STEP_S)
            num_steps += 1
            found[name] = digest
            assert expected is None or expected[name] == digest, f"batch {name} differs from that of the reference run"
            if time.time() >= until and expected is not None:
                break
    rate = num_steps / (time.monotonic() - start)
    return {"who": "trainer", "num_runs": num_steps, "rate": rate, "batches": found}


def precache_changes(folder: Path, dice: random.Random) -> None:
    """Change, add and remove images of a dataset, precache it, and read everything back."""
    config = config_of(folder / "cache", "changing", folder / "changing")
    for _ in range(4):
        write_photo(folder / "changing" / f"{dice.randrange(NUM_CHANGING)}.png", dice.randrange(1 << 30))
    (folder / "changing" / f"{dice.randrange(NUM_CHANGING)}.png").unlink(missing_ok=True)
    report = run_precache(config)
    assert not report.refused, report.refused[0]
    with LatentCache(config.cache.path, manifest="changing") as cache:
        for sample_id in cache.sample_ids():
            cache.batch([sample_id], device="cpu")


def find_no_damage(cache: Path) -> None:
    assert verify(cache).ok, "verify finds damage"


def repeat(who: str, work: Callable[[], object], until: float, pause_s: float = PAUSE_S) -> dict[str, Any]:
    """Call it until the given time, and count how often the store was busy."""
    counts = Counter[str]()
    while time.time() < until:
        try:
            work()
            counts["num_runs"] += 1
        except StoreBusyError:
            counts["num_busy"] += 1
        time.sleep(pause_s)
    return {"who": who, **counts}


def mixed(soak: Soak) -> None:
    cache, seed = soak.folder / "cache", soak.options.seed
    for name, num, first in (("train", NUM_PHOTOS, 0), ("changing", NUM_CHANGING, 10_000)):
        for number in range(num):
            write_photo(soak.folder / name / f"{number}.png", first + number)
        run_precache(config_of(cache, name, soak.folder / name))
    [solo] = together(soak.goal("a trainer alone"), [partial(train, cache, seed, 0.0)])
    say(f"alone: {solo['num_runs']} steps, {solo['rate']:.2f} a second")

    goal = soak.goal("two trainers, precache, verify, prune, compact at once: no error, batches equal the solo run's")
    until = time.time() + soak.n
    keep = partial(keys_in_use, ManifestFolder(cache / "manifests"))
    jobs = [
        *[partial(train, cache, seed, until, solo["batches"])] * 2,
        partial(repeat, "precache", partial(precache_changes, soak.folder, soak.random), until, 12 * PAUSE_S),
        partial(repeat, "verify", partial(find_no_damage, cache), until),
        partial(repeat, "prune", partial(prune, cache, keep), until),
        partial(repeat, "compact", partial(compact, cache), until),
    ]
    results = together(goal, jobs)
    goal.figures["seconds"] = soak.n
    for result in results:
        goal.n += result.get("num_runs", 0)
        for name in ("num_runs", "num_busy"):
            goal.count(f"{result['who']} {name}", result.get(name, 0))
    if soak.n >= MIN_RATE_S:
        with goal.case("prune beside trainers"):
            assert any(result.get("num_runs") for result in results if result["who"] == "prune"), "it was always busy"
        rates = soak.goal(f"trainers at {MIN_RATE:.0%} of their rate alone ({solo['rate']:.2f} steps a second)")
        for share in [result["rate"] / solo["rate"] for result in results if "rate" in result]:
            with rates.case("trainer"):
                assert share >= MIN_RATE, f"it had {share:.1%} of its rate alone"


PARTS = {"writers": (writers, 1000, 60), "mixed": (mixed, 1800, 10)}


if __name__ == "__main__":
    sys.exit(run_soak(PARTS, __doc__))
