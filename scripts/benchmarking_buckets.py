"""What the benchmarks of object stores share: the server, and methods that move the same packs in turns."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import obstore
from benchmarking import environment, in_turns, rate_lines, ratios, spread
from obstore.store import S3Store

from latentcache.remote.bucket import BucketTransport
from latentcache.remote.transport import ANY_VERSION

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.swift_server import swift_serving

BUCKET = "bench"
WANTED_RATIO = 0.85


@contextmanager
def serving() -> Iterator[S3Store]:
    """An empty bucket of a real S3 server on this machine, whose credentials are in the environment.

    It cannot compare before it replaces, which `push` demands; one client alone writes here.
    """
    put = BucketTransport._put

    with (
        patch.object(BucketTransport, "check_compares", lambda bucket: None),
        patch.object(BucketTransport, "_put", lambda bucket, name, data, version: put(bucket, name, data, ANY_VERSION)),
        swift_serving() as server,
    ):
        server.make_bucket(BUCKET)
        os.environ.update(server.environment())
        yield server.store(BUCKET)


def measure(
    methods: Mapping[str, Callable[[], float]],
    compared_with: Mapping[str, str],
    packs: Sequence[Path],
    num_threads: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Methods that return the seconds in which they moved all packs, `num_threads` at once, each with another one."""
    num_bytes = sum(path.stat().st_size for path in packs)
    for method in methods.values():
        method()
    seconds = in_turns(methods, options.repetitions, clock=lambda method: method())
    return {
        "num_packs": len(packs),
        "num_bytes": num_bytes,
        "num_threads": num_threads,
        "seconds": {name: spread(taken) for name, taken in seconds.items()},
        "gb_per_s": {name: num_bytes / spread(taken)["median"] / 1e9 for name, taken in seconds.items()},
        "ratio": {name: ratios(seconds[compared_with[name]], taken) for name, taken in seconds.items()},
        "wanted_ratio": WANTED_RATIO,
        "environment": environment("cpu", packs[0]) | {"obstore": obstore.__version__},
    }


def table(result: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    """The lines of what `measure` returned."""
    packs = f"{result['num_packs']} packs, {result['num_bytes']:,} bytes, {result['num_threads']} at once"
    return [packs, *rate_lines(result, labels, "obstore")]
