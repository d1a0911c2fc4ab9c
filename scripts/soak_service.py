"""Clients of one server at once, --n of them for --seconds: no error, no wrong batch, and no request that waits long.

Each client is a process. It requests batches of random samples without a pause, each by one request, and compares each
batch, to the last bit, with the same batch of the served directory itself. Now and then it adds an entry of its own,
reads it back and removes it. The times are those of `LatentCache.batch`; p99 is compared with p50 where the run is long
enough to say anything.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import soaking
import torch
from bench_loader import make_cache
from served_cache import served

from latentcache import LatentCache

BATCH_SIZE = 16
NUM_SAMPLES = 512
SCALE = 4
"""Divides the sides of the images: a batch has about 2 MB."""
CHANGE_EVERY = 50
"""Batches between two entries that a client adds."""
MAX_RATIO = 5.0
"""Of p99 to p50."""
MIN_RATIO_S = 120
"""A run must be as long for its times to say anything."""
SETTLE_BATCHES = 20
"""Of each client, whose times do not count: processes that start take the others' cores."""
START_S = 120


def client(number: int, url: str, cache: Path, token: str, options: argparse.Namespace, queue: Any) -> None:
    """Read, compare, and report: the times of its batches, what was wrong, and its errors."""
    torch.set_num_threads(1)
    rng = random.Random(f"{options.seed} {number}")
    taken: list[float] = []
    wrong: list[str] = []
    errors: list[str] = []
    num_changes = 0
    with (
        LatentCache(url, token=token, local=cache.parent / f"local-{number}") as far,
        LatentCache(cache, read_only=True) as near,
    ):
        ids = near.sample_ids()
        buckets = [ids[0::2], ids[1::2]]
        queue.put(("ready", number))
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            chosen = rng.sample(rng.choice(buckets), BATCH_SIZE)
            try:
                start = time.perf_counter()
                batch = far.batch(chosen, device="cpu", output="moments")
                taken.append(time.perf_counter() - start)
                expected = near.batch(chosen, device="cpu", output="moments")
                if soaking.batch_digest(batch) != soaking.batch_digest(expected):
                    wrong.append(f"client {number}, batch {len(taken)}: {chosen}")
                if len(taken) % CHANGE_EVERY == 0:
                    entry = soaking.text_entry(10_000 + 100 * len(taken) + number)
                    far.store.add([entry])
                    found = far.store.get(entry.record.key)
                    if soaking.entry_digest(found) != soaking.entry_digest(entry):
                        wrong.append(f"client {number}: its own entry {entry.record.key}")
                    num_changes += 1
            except Exception as error:
                errors.append(f"client {number}, batch {len(taken)}: {error!r}")
    queue.put(("done", number, taken, wrong, errors, num_changes))


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def resident_bytes(process: int) -> int:
    """Memory of a process that is its own; 0 where the system does not say."""
    status = Path(f"/proc/{process}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def run_clients(soak: soaking.Soak, goal: soaking.Goal, cache: Path, token: str) -> list[Any]:
    """What each client reported. The server's memory goes to the figures."""
    context, options = multiprocessing.get_context("spawn"), soak.options
    arguments = ("--write-token-file", str(soak.folder / "token"))
    with served(cache, *arguments, log=soak.folder / "server.log") as (url, server):
        before, queue = resident_bytes(server), context.Queue()
        clients = [
            context.Process(target=client, args=(number, url, cache, token, options, queue)) for number in range(soak.n)
        ]
        for process in clients:
            process.start()
        results: list[Any] = []
        peak = before
        end = time.monotonic() + options.seconds + START_S
        while len(results) < soak.n and time.monotonic() < end:
            peak = max(peak, resident_bytes(server))
            if queue.empty():
                time.sleep(0.2)
            elif (message := queue.get())[0] == "done":
                results.append(message[1:])
        for process in clients:
            process.join(START_S)
            if process.exitcode != 0:
                goal.fail(f"a client ended with {process.exitcode}")
                process.kill()
    goal.figures["server_grew_mb"] = round((peak - before) / 1e6, 1)
    return results


def program(soak: soaking.Soak) -> None:
    goal = soak.goal(f"{soak.n} clients of one server at once: no error, no wrong batch")
    cache, token = soak.folder / "cache", secrets.token_urlsafe(24)
    make_cache(cache, NUM_SAMPLES, SCALE)
    (soak.folder / "token").write_text(token)
    results = run_clients(soak, goal, cache, token)
    if len(results) < soak.n:
        goal.fail(f"{soak.n - len(results)} clients reported nothing")
    times = [value for _, taken, *_ in results for value in taken[SETTLE_BATCHES:] or taken]
    goal.n = sum(len(taken) for _, taken, *_ in results)
    for _, _, wrong, errors, _ in results:
        for what in [*wrong, *errors]:
            goal.fail(what)
    if not times:
        goal.fail("no client read a batch")
        return
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    goal.figures |= {
        "num_errors": sum(len(errors) for *_, errors, _ in results),
        "num_wrong": sum(len(wrong) for _, _, wrong, _, _ in results),
        "num_changes": sum(result[-1] for result in results),
        "batches_per_s": round(goal.n / soak.options.seconds, 1),
        "mean_ms": round(1e3 * statistics.fmean(times), 2),
        "p50_ms": round(1e3 * p50, 2),
        "p99_ms": round(1e3 * p99, 2),
        "p99_of_p50": round(p99 / p50, 2),
    }
    if soak.options.seconds >= MIN_RATIO_S and p99 > MAX_RATIO * p50:
        goal.fail(f"p99 is {p99 / p50:.1f} times p50, and {MAX_RATIO:g} are allowed")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = soaking.make_parser(__doc__, 8, "clients at once")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long they read (default: %(default)s)")
    return soaking.run_soak(program, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
