"""Everything at once on one cache: two trainers, a precacher, a verify, a prune and a compact, for --n seconds.

A trainer first runs alone: its rate, and a digest of each batch, are what the two are compared with. Its step takes as
long as one on a device would, without a device: it waits. The precacher changes, adds and removes images of a second
dataset, encodes what is new, and reads all of it back. The others run the command line again and again. Each may find
that another has the cache (StoreBusyError): it says so, and tries again. Anything else is a failure.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soaking
import torch
from PIL import Image

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader, run_precache
from latentcache.cli.app import main as command_line
from latentcache.config import Config
from latentcache.config_file import parse_config
from latentcache.errors import StoreBusyError

NUM_PHOTOS, NUM_CHANGING = 96, 40
NUM_EPOCHS = 3
"""Epochs that differ; afterwards they come again, so that each batch has a digest to compare with."""
BATCH_SIZE = 4
STEP_S = 0.1
SIDE = 64
MIN_RATE = 0.95
"""Of a trainer, of its rate when it is alone."""
PAUSE_S = 0.5
"""Between two runs of a command; four times as long between two runs of precache, which keeps the others out."""
MIN_RATE_S = 120
"""A run must be as long for its rates to say anything."""


def write_image(path: Path, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    Image.fromarray(values).save(temporary, "PNG")
    temporary.replace(path)
    path.with_suffix(".txt").write_text(f"photo {seed}")


def config_of(folder: Path, name: str) -> Config:
    dataset = {
        "name": name,
        "source": {"path": folder / name},
        "buckets": {"area": SIDE * SIDE, "step": 32},
        "images": {"min_side": 8},
    }
    settings = {
        "cache": {"path": folder / "cache"},
        "datasets": [dataset],
        "model": {"path": "tiny"},
        "encode": {"device": "cpu", "num_workers": 1},
    }
    return parse_config(settings)


def batches(cache: Path, seed: int, epochs: Iterator[int]) -> Iterator[tuple[str, str]]:
    """Epoch and number of each batch, and its digest."""
    dataset = LatentDataset(cache, "train", caption="random")
    with dataset.cache:
        sampler = BucketBatchSampler(dataset, BATCH_SIZE, seed=seed)
        for epoch in epochs:
            sampler.set_epoch(epoch)
            for number, batch in enumerate(LatentLoader(sampler, device="cpu", scaled=True)):
                yield f"{epoch}/{number}", soaking.batch_digest(batch)


def train(cache: str, seed: int, expected: dict[str, str] | None, until: float, out: Any) -> None:
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    failures: list[str] = []
    num_steps = 0
    start = 0.0
    try:
        while num_steps == 0 or time.time() < until:
            # Each round opens the cache again.
            for name, digest in batches(Path(cache), seed, iter(range(NUM_EPOCHS))):
                start = start or time.monotonic()  # not before the first batch is there
                time.sleep(STEP_S)
                num_steps += 1
                found[name] = digest
                if expected is not None and expected[name] != digest:
                    failures.append(f"batch {name} differs from that of the solo run")
                if time.time() >= until and expected is not None:
                    break
    except Exception as error:
        failures.append(repr(error))
    rate = num_steps / (time.monotonic() - start)
    out.put({"who": "trainer", "n": num_steps, "failures": failures, "rate": rate, "batches": found})


def precache_again(folder: str, seed: int, until: float, out: Any) -> None:
    torch.set_num_threads(1)
    base, dice = Path(folder), random.Random(seed)
    config = config_of(base, "changing")
    failures: list[str] = []
    counts: Counter[str] = Counter()
    while time.time() < until:
        for _ in range(4):
            write_image(base / "changing" / f"{dice.randrange(NUM_CHANGING)}.png", dice.randrange(1 << 30))
        gone = base / "changing" / f"{dice.randrange(NUM_CHANGING)}.png"
        gone.unlink(missing_ok=True)
        try:
            report = run_precache(config)
            if report.refused:
                failures.append(f"refused: {report.refused[0]}")
            with LatentCache(config.cache.path, manifest="changing") as cache:
                for sample_id in cache.sample_ids():
                    cache.batch([sample_id], device="cpu")
            counts["num_runs"] += 1
            counts["num_encoded"] += report.num_encoded
        except StoreBusyError:
            counts["num_busy"] += 1
        except Exception as error:
            failures.append(repr(error))
        time.sleep(4 * PAUSE_S)
    out.put({"who": "precache", "n": counts["num_runs"], "failures": failures, **counts})


def command_again(command: str, cache: str, until: float, out: Any) -> None:
    """The command line, as a user runs it, but in a process that has imported torch already."""
    torch.set_num_threads(1)
    failures: list[str] = []
    counts: Counter[str] = Counter()
    while time.time() < until:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
            code = command_line([command, cache, "--json"])
        answer = json.loads(text.getvalue())
        if code == 0:
            counts["num_runs"] += 1
        elif answer.get("type") == "StoreBusyError":
            counts["num_busy"] += 1
        else:
            failures.append(f"exit code {code}: {text.getvalue()[:2000]}")
        time.sleep(PAUSE_S)
    out.put({"who": command, "n": counts["num_runs"], "failures": failures, **counts})


def program(soak: soaking.Soak) -> None:
    for number in range(NUM_PHOTOS):
        write_image(soak.folder / "train" / f"{number}.png", number)
    for number in range(NUM_CHANGING):
        write_image(soak.folder / "changing" / f"{number}.png", 10_000 + number)
    for name in ("train", "changing"):
        run_precache(config_of(soak.folder, name))
    cache = str(soak.folder / "cache")

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["latentcache.precache.run", "latentcache.cli.app", "latentcache.models.tiny"])
    solo = together(context, soak, [(train, (cache, soak.options.seed, None, 0.0))])[0]
    soak.say(f"alone: {solo['n']} steps, {solo['rate']:.2f} a second")
    until = time.time() + soak.n
    jobs: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (train, (cache, soak.options.seed, solo["batches"], until)),
        (train, (cache, soak.options.seed, solo["batches"], until)),
        (precache_again, (str(soak.folder), soak.options.seed, until)),
        *((command_again, (command, cache, until)) for command in ("verify", "prune", "compact")),
    ]
    results = together(context, soak, jobs)
    judge(soak, results, solo["rate"], len(jobs) - len(results))


def judge(soak: soaking.Soak, results: list[Any], solo_rate: float, num_dead: int) -> None:
    goal = soak.goal("two trainers, precache, verify, prune, compact at once: no error, batches equal the solo run's")
    goal.figures["seconds"] = soak.n
    if num_dead:
        goal.fail(f"{num_dead} processes died")
    shares = []
    for number, result in enumerate(results):
        is_trainer = result["who"] == "trainer"
        who = f"trainer {number + 1}" if is_trainer else result["who"]
        goal.n += result["n"]
        goal.figures[who] = {name: value for name, value in result.items() if name.startswith("num_")} or result["n"]
        shares += [(who, result["rate"] / solo_rate)] if is_trainer else []
        for failure in result["failures"]:
            goal.fail(f"{who}: {failure}")
    if soak.n < MIN_RATE_S:
        return
    rates = soak.goal(f"trainers at {MIN_RATE:.0%} of their rate alone ({solo_rate:.2f} steps a second)")
    for who, share in shares:
        rates.n += 1
        rates.figures[who] = f"{share:.1%}"
        if share < MIN_RATE:
            rates.fail(f"{who} had {share:.1%} of its rate alone")


def together(context: Any, soak: soaking.Soak, jobs: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> list[Any]:
    """What each job reports. All run at once."""
    queues = [context.Queue() for _ in jobs]
    children = [
        context.Process(target=target, args=(*arguments, out))
        for (target, arguments), out in zip(jobs, queues, strict=True)
    ]
    for child in children:
        child.start()
    results = []
    for child, out in zip(children, queues, strict=True):
        while child.is_alive() and out.empty():
            time.sleep(0.1)
        with contextlib.suppress(Exception):
            results.append(out.get(timeout=5))
        child.join(60)
    return results


def main() -> int:
    return soaking.run_soak(program, soaking.make_parser(__doc__, 1800, "seconds"))


if __name__ == "__main__":
    sys.exit(main())
