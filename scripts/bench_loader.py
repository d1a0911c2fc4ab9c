"""How long a training loop waits for its batches: the loader with and without prefetch, and torch's DataLoader.

    python scripts/bench_loader.py              # a table; some minutes, 0.4 GB of disk
    python scripts/bench_loader.py --json       # one document
    python scripts/bench_loader.py --tiny       # for correctness only
    python scripts/bench_loader.py --compute    # the step computes on the CPU instead of leaving it idle

A training step of T seconds is faked: it sleeps, as the host does while an accelerator works. T is a multiple of the
time that one batch takes without prefetch (measured first). The samples are those of 1024x1024: moments, from which
latents are drawn, and embeddings, in float16. The methods take turns in each round; shares are the time in `next` as a
part of T: the mean is the median over rounds, p99 is over all steps. Where there is an accelerator with streams, the
copies of the loader are compared with one copy of as many bytes from pinned memory.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarking import environment, in_turns, make_parser, parse, ratios, run_in_folder, spread
from benchmarking_samples import write_manifest
from torch.utils.data import DataLoader

from latentcache import LatentDataset
from latentcache.dataset.row_table import CaptionRef, ImageRef, Row
from latentcache.devices.transfer import transfer_to
from latentcache.identity import key_of
from latentcache.loading.loader import LatentLoader
from latentcache.loading.sampler import BucketBatchSampler, noise_generator
from latentcache.store.disk import DiskStore
from latentcache.types import Crop, Entry, Geometry, Record, Size

BUCKETS = (Size(1024, 1024), Size(832, 1216))
METHODS = {
    "loader": "LatentLoader, prefetch=2",
    "loader_without_prefetch": "LatentLoader, prefetch=0",
    "dataloader_0": "DataLoader, num_workers=0",
    "dataloader_2": "DataLoader, num_workers=2",
}
WANTED_SHARE = 0.02
COPIES = 20

Batches = Iterator[dict[str, Any]]


def make_cache(path: Path, num_samples: int, scale: int) -> None:
    """A cache of random values, of which half the samples lie in each bucket. `scale` divides the sides."""
    generator = torch.Generator().manual_seed(0)
    rows: dict[str, Row] = {}

    def entries() -> Iterator[Entry]:
        for number in range(num_samples):
            height, width = BUCKETS[number % 2]
            size = Size(height // scale, width // scale)
            values: dict[str, dict[str, tuple[int, ...]]] = {
                "image": {"moments": (8, size.height // 8, size.width // 8)},
                "text": {"prompt_embeds": (77, 2048 // scale), "pooled_prompt_embeds": (1280 // scale,)},
            }
            keys = {}
            for kind, shapes in values.items():
                identity = {"bench": kind, "number": number}
                keys[kind] = key_of(identity)
                tensors = {name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()}
                yield Entry(Record(keys[kind], kind, identity, {}), tensors)
            geometry = Geometry(size, size, Crop(0, 0), size)
            images, captions = (ImageRef(keys["image"], geometry),), (CaptionRef(str(number), keys["text"]),)
            rows[str(number)] = Row(str(number), str(number), None, images, captions)

    with DiskStore(path) as store:
        store.add(entries())
    write_manifest(path, rows)


class Bench:
    """The methods over one cache, each as endless batches."""

    def __init__(self, path: Path, batch_size: int, device: torch.device):
        self.path, self.batch_size, self.device = path, batch_size, device
        self.batches: dict[str, Batches] = {
            "loader": self.loader(prefetch=2).forever(),
            "loader_without_prefetch": self.loader(prefetch=0).forever(),
            "dataloader_0": self.dataloader(0),
            "dataloader_2": self.dataloader(2),
        }

    def dataset(self) -> LatentDataset:
        return LatentDataset(self.path)

    def sampler(self, dataset: LatentDataset) -> BucketBatchSampler:
        return BucketBatchSampler(dataset, self.batch_size, seed=0)

    def loader(self, **options: Any) -> LatentLoader:
        return LatentLoader(self.sampler(self.dataset()), device=self.device, **{"scaled": True, **options})

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

    def batch_s(self, num_steps: int) -> float:
        """Median time of one batch without prefetch."""
        return statistics.median(waits(self.batches["loader_without_prefetch"], num_steps, lambda: None))


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


def step_of(seconds: float, *, compute: bool) -> Callable[[], None]:
    """A fake training step."""
    if not compute:
        return lambda: time.sleep(seconds)
    matrix = torch.randn(256, 256)

    def busy() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            torch.mm(matrix, matrix)

    return busy


def p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def measure(bench: Bench, step_s: float, options: argparse.Namespace) -> dict[str, Any]:
    """The share of waiting of each method at this step."""
    all_waits: dict[str, list[float]] = {name: [] for name in METHODS}
    step = step_of(step_s, compute=options.compute)

    def wait_s(name: str) -> float:
        waits(bench.batches[name], 3, step)  # the queue of the prefetching ones fills again
        taken = waits(bench.batches[name], options.num_steps, step)
        all_waits[name] += taken
        return sum(taken) / len(taken)

    methods = {name: partial(wait_s, name) for name in METHODS}
    means = in_turns(methods, options.repetitions, clock=lambda method: method())
    shares = {name: spread([mean / step_s for mean in means[name]]) for name in METHODS}
    return {
        name: {
            "mean": shares[name]["median"],
            "mean_min": shares[name]["min"],
            "mean_max": shares[name]["max"],
            "p99": p99(all_waits[name]) / step_s,
        }
        for name in METHODS
    }


def host_to_device(bench: Bench, repetitions: int) -> dict[str, Any] | None:
    """GB/s of the loader's copies and of one copy of as many bytes from pinned memory; None without streams."""
    transfer = transfer_to(bench.device)
    if not transfer.overlaps:
        return None
    module = torch.get_device_module(bench.device)
    dataset = bench.dataset()
    refs = dataset.refs(next(iter(bench.sampler(dataset))))
    gathered = dataset.cache.gather(refs)
    host = {name: value.pin_memory() if isinstance(value, torch.Tensor) else value for name, value in gathered.items()}
    num_bytes = sum(value.nbytes for value in host.values() if isinstance(value, torch.Tensor))
    flat = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=bench.device)

    def timed(copy: Callable[[], Any]) -> float:
        module.synchronize(bench.device)
        start = time.perf_counter()
        for _ in range(COPIES):
            copy()
        transfer.finish()
        module.synchronize(bench.device)
        return time.perf_counter() - start

    copies: dict[str, Callable[[], Any]] = {
        "pinned_copy": lambda: target.copy_(flat, non_blocking=True),
        "loader": lambda: transfer.send(lambda: host, lambda batch: batch),
    }
    taken = in_turns(copies, repetitions, warm=True, clock=timed)
    gigabytes = num_bytes * COPIES / 1e9
    return {
        "pinned_copy_gb_per_s": gigabytes / statistics.median(taken["pinned_copy"]),
        "loader_gb_per_s": gigabytes / statistics.median(taken["loader"]),
        "fraction_of_pinned_copy": ratios(taken["pinned_copy"], taken["loader"])["median"],
    }


def run(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    make_cache(path, options.num_samples, options.scale)
    bench = Bench(path, options.batch_size, device)
    for batches in bench.batches.values():
        bench.settle(batches)
    batch_s = bench.batch_s(options.num_steps)
    steps = {}
    for factor in options.factors:
        step_s = batch_s * factor
        steps[f"{factor:g}"] = {"step_s": step_s, "wait_share": measure(bench, step_s, options)}
    result = {
        "batch_s": batch_s,
        "steps": steps,
        "wait_share": next(iter(steps.values()))["wait_share"]["loader"]["mean"],
        "wanted_wait_share": WANTED_SHARE,
        "host_to_device": host_to_device(bench, options.repetitions),
        "environment": environment(device, path),
    }
    for batches in bench.batches.values():
        batches.close()  # type: ignore[attr-defined]
    return result


def to_text(result: Mapping[str, Any]) -> str:
    settings = result["settings"]
    lines = [f"{settings['batch_size']} samples a batch, {result['batch_s'] * 1e3:.2f} ms to make one without prefetch"]
    for factor, measured in result["steps"].items():
        lines.append(
            f"\nstep of {measured['step_s'] * 1e3:.2f} ms ({factor} batches)    waiting, as a share of the step"
        )
        lines.append(f"{'':32}{'mean':>9}{'min..max of rounds':>22}{'p99':>9}")
        for name, label in METHODS.items():
            share = measured["wait_share"][name]
            spread = f"{share['mean_min']:.2%}..{share['mean_max']:.2%}"
            lines.append(f"{label:32}{share['mean']:>9.2%}{spread:>22}{share['p99']:>9.2%}")
    copies = result["host_to_device"]
    if copies is None:
        lines.append("\nhost to device: not measured, the device has no streams")
    else:
        fraction = f"{copies['fraction_of_pinned_copy']:.0%} of a copy from pinned memory"
        lines.append(f"\nhost to device: {copies['loader_gb_per_s']:.1f} GB/s, {fraction}")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--num_samples", type=int, default=512)
    parser.add_argument("--num_steps", type=int, default=40, help="steps in a round")
    parser.add_argument("--factors", type=float, nargs="+", default=[1.25, 4], help="T, in times of a batch")
    parser.add_argument("--device", default=str(accelerator or "cpu"))
    parser.add_argument("--compute", action="store_true", help="the step computes on the CPU")
    options = parse(parser)
    options.scale = 1
    if options.tiny:
        options.scale, options.batch_size, options.num_samples, options.num_steps = 16, 2, 8, 4
    run_in_folder(run, options, to_text)


if __name__ == "__main__":
    main()
