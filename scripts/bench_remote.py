"""What a cache behind HTTP costs a training loop: a LatentLoader on a service, with and without the local tier.

    python scripts/bench_remote.py              # a table; a minute or two, 1 GB of disk
    python scripts/bench_remote.py --json       # one document
    python scripts/bench_remote.py --tiny       # for correctness only

Server and clients are on one machine, and the clients take turns: an epoch of each in each round. The samples are those
of 1024x1024, in float16. Before the first round the local tier has all of them, and every reader is warm. Ratios are
those of a round; the goal is that the tier takes at most 1.1 times as long as the local cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_loader import make_cache
from benchmarking import environment, in_turns, make_parser, parse, rate_lines, ratios, run_in_folder, spread
from served_cache import served

from latentcache import BucketBatchSampler, LatentDataset, LatentLoader

METHODS = {
    "local_cache": "the cache's own directory",
    "local_tier": "the service, with a warm local tier",
}
WANTED_RATIO = 1.1
WARM_EPOCHS = 4


def epoch(loader: LatentLoader) -> None:
    """Read one epoch, always the same."""
    loader.set_epoch(0)
    for batch in loader:
        del batch


def loader_of(where: Any, options: argparse.Namespace, **more: Any) -> LatentLoader:
    sampler = BucketBatchSampler(LatentDataset(where, **more), options.batch_size, seed=0)
    return LatentLoader(sampler, device="cpu", output="moments", prefetch=options.prefetch)


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    cache = folder / "cache"
    make_cache(cache, options.num_samples, options.scale)
    with served(cache, log=folder / "server.log") as (url, _):
        loaders = {
            "local_cache": loader_of(cache, options),
            "local_tier": loader_of(url, options, local=folder / "local"),
        }
        for loader in loaders.values():
            for _ in range(WARM_EPOCHS):
                epoch(loader)
        calls: dict[str, Callable[[], None]] = {name: partial(epoch, loader) for name, loader in loaders.items()}
        seconds = in_turns(calls, options.repetitions)
        batch = next(iter(loaders["local_cache"]))
        batch_bytes = sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))
        num_batches = len(loaders["local_cache"])
        for loader in loaders.values():
            loader.close()
            loader.dataset.cache.close()
    return {
        "num_batches": num_batches,
        "batch_bytes": batch_bytes,
        "seconds": {name: spread(taken) for name, taken in seconds.items()},
        "gb_per_s": {n: num_batches * batch_bytes / spread(taken)["median"] / 1e9 for n, taken in seconds.items()},
        "ratio": {name: ratios(taken, seconds["local_cache"]) for name, taken in seconds.items()},
        "wanted_ratio": WANTED_RATIO,
        "environment": environment("cpu", folder),
    }


def to_text(result: Mapping[str, Any]) -> str:
    settings = result["settings"]
    batches = (
        f"{result['num_batches']} batches of {settings['batch_size']} samples, {result['batch_bytes']:,} bytes each"
    )
    lines = [batches, *rate_lines(result, METHODS, "the local cache")]
    lines.append(f"wanted: {METHODS['local_tier']} at most {WANTED_RATIO} times the local cache")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--num_samples", type=int, default=512)
    parser.add_argument("--prefetch", type=int, default=2, help="batches that the loader reads ahead")
    options = parse(parser)
    options.scale = 1
    if options.tiny:
        options.scale, options.batch_size, options.num_samples = 16, 2, 16
    run_in_folder(run, options, to_text)


if __name__ == "__main__":
    main()
