"""How long a training loop waits for its batches: the loader with and without prefetch, and torch's DataLoader.

    python scripts/bench_loader.py              # a table; some minutes, 0.4 GB of disk
    python scripts/bench_loader.py --json       # one document
    python scripts/bench_loader.py --tiny       # for correctness only

`prefetch_N` is LatentLoader, `dataloader_N` torch's DataLoader with N workers.
A training step of T seconds is faked: it sleeps, as the host does while an accelerator works. T is a multiple of the
time that one batch takes without prefetch (measured first). The samples are those of 1024x1024: moments, from which
latents are drawn, and embeddings, in float16. The methods take turns in each round; shares are the time in `next` as a
part of T: the mean is the median over rounds, p99 is over all steps. bench_cuda.py measures the loader's copies.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarking import in_turns, make_cache, make_parser, parse, run_in_folder, spread
from torch.utils.data import DataLoader

from latentcache import LatentDataset
from latentcache.loading.loader import LatentLoader
from latentcache.loading.sampler import BucketBatchSampler, noise_generator

WANTED_SHARE = 0.02

Batches = Iterator[dict[str, Any]]


class Bench:
    """The methods over one cache, each as endless batches."""

    def __init__(self, path: Path, batch_size: int, device: torch.device):
        self.path, self.batch_size, self.device = path, batch_size, device
        self.batches: dict[str, Batches] = {
            "prefetch_2": self.loader(prefetch=2).forever(),
            "prefetch_0": self.loader(prefetch=0).forever(),
            "dataloader_0": self.dataloader(0),
            "dataloader_2": self.dataloader(2),
        }

    def dataset(self) -> LatentDataset:
        return LatentDataset(self.path)

    def sampler(self, dataset: LatentDataset) -> BucketBatchSampler:
        return BucketBatchSampler(dataset, self.batch_size, seed=0)

    def loader(self, prefetch: int) -> LatentLoader:
        return LatentLoader(self.sampler(self.dataset()), device=self.device, scaled=True, prefetch=prefetch)

    def dataloader(self, num_workers: int) -> Batches:
        dataset = self.dataset()
        sampler = self.sampler(dataset)
        # Without its own generator a DataLoader draws from the global one.
        loader: DataLoader[dict[str, Any]] = DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=self.device.type != "cpu",
            multiprocessing_context="spawn" if num_workers else None,
            generator=torch.Generator(),
        )
        for epoch in range(sys.maxsize):
            sampler.set_epoch(epoch)
            for position, batch in enumerate(loader):
                generator = noise_generator(0, epoch, position)
                yield dataset.place(batch, device=self.device, scaled=True, generator=generator)

    def settle(self, batches: Batches) -> None:
        """Two epochs: every entry has been verified, in the workers too, and the buffers are there."""
        for _ in range(2 * len(self.sampler(self.dataset()))):
            next(batches)


def waits(batches: Batches, num_steps: int, step: Callable[[], None]) -> list[float]:
    """Seconds in `next` before each step."""
    taken = []
    for _ in range(num_steps):
        start = time.perf_counter()
        batch = next(batches)
        taken.append(time.perf_counter() - start)
        del batch
        step()
    return taken


def p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def measure(bench: Bench, step_s: float, options: argparse.Namespace) -> dict[str, Any]:
    """The share of waiting of each method at this step."""
    all_waits: dict[str, list[float]] = {name: [] for name in bench.batches}
    step = partial(time.sleep, step_s)

    def wait_s(name: str) -> float:
        waits(bench.batches[name], 3, step)  # the queue of the prefetching ones fills again
        taken = waits(bench.batches[name], options.num_steps, step)
        all_waits[name] += taken
        return sum(taken) / len(taken)

    methods = {name: partial(wait_s, name) for name in bench.batches}
    means = in_turns(methods, options.repetitions, clock=lambda method: method())
    return {
        name: {"mean": spread([mean / step_s for mean in values]), "p99": p99(all_waits[name]) / step_s}
        for name, values in means.items()
    }


def run(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    make_cache(path, options.num_samples, options.scale)
    bench = Bench(path, options.batch_size, device)
    for batches in bench.batches.values():
        bench.settle(batches)
    batch_s = statistics.median(waits(bench.batches["prefetch_0"], options.num_steps, lambda: None))
    steps = {}
    for factor in options.factors:
        step_s = batch_s * factor
        steps[f"{factor:g}"] = {"step_s": step_s, "wait_share": measure(bench, step_s, options)}
    result = {
        "batch_s": batch_s,
        "steps": steps,
        "wanted_wait_share": WANTED_SHARE,
    }
    for batches in bench.batches.values():
        batches.close()  # type: ignore[attr-defined]
    return result


def main() -> None:
    parser = make_parser(__doc__)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--device", default=str(accelerator or "cpu"))
    options = parse(parser)
    options.factors = (1.25, 4)
    """T, in times of a batch."""
    options.scale, options.batch_size, options.num_samples, options.num_steps = 1, 16, 512, 40
    if options.tiny:
        options.scale, options.batch_size, options.num_samples, options.num_steps = 16, 2, 8, 4
    run_in_folder(run, options)


if __name__ == "__main__":
    main()
