"""What the benchmarks of object stores share: the server, and methods that move the same packs in turns."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import obstore
from benchmarking import environment, in_turns, rate_lines, ratios, spread
from obstore.store import S3Store

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.comparing_server import comparing_server

BUCKET = "bench"
WANTED_RATIO = 0.85


@contextmanager
def serving() -> Iterator[S3Store]:
    """An empty bucket of a server in this process that speaks S3 and compares; the environment leads to it."""
    with comparing_server() as server:
        environment = server.environment("s3")
        os.environ.update(environment)
        yield S3Store(
            BUCKET,
            endpoint=environment["AWS_ENDPOINT_URL"],
            access_key_id=environment["AWS_ACCESS_KEY_ID"],
            secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
            region=environment["AWS_REGION"],
            client_options={"allow_http": True},
            disable_bulk_delete=True,  # it takes no such request
        )


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
