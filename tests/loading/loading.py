"""Helpers for the tests of the loader."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from helpers.tiny_configs import tiny_config
from torch.utils.data import default_collate

from latentcache import LatentDataset
from latentcache.config import Config
from latentcache.loading.sampler import BucketBatchSampler, noise_generator


def config_of(folder: Path, **changes: Any) -> Config:
    """The config of the fixture `folder`, with changes by dotted name."""
    settings: dict[str, Any] = {"datasets.0.flip": True, "datasets.0.repeats": 2, "encode.num_workers": 1}
    return tiny_config(folder, **settings | changes)


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with its tensors as lists, to compare it and to keep it."""
    return {name: v.float().tolist() if isinstance(v, torch.Tensor) else v for name, v in batch.items()}


def by_hand(sampler: BucketBatchSampler, *, epoch: int = 0) -> list[dict[str, Any]]:
    """The expected batches of a loader with scaled=True, made with the dataset alone."""
    dataset = sampler.dataset
    batches = []
    for planned in sampler.plan(epoch):
        batch = default_collate(dataset.__getitems__(planned.items))
        generator = noise_generator(sampler.seed, epoch, planned.position)
        batch = dataset.place(batch, device="cpu", scaled=True, generator=generator)
        for name in ("original_size", "resized_size", "crop_top_left", "target_size"):
            batch[name] = [tuple(size) for size in batch[name].tolist()]
        batches.append(plain(batch))
    return batches


def ids(batches: Iterable[dict[str, Any]]) -> list[list[str]]:
    return [batch["sample_id"] for batch in batches]


def num_threads() -> int:
    return sum(thread.name.startswith("latentcache-prefetch") for thread in threading.enumerate())


def wait_for_no_thread(timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while num_threads():
        assert time.monotonic() < end, "a thread of a loader is still there"
        time.sleep(0.01)


def lose_image(dataset: LatentDataset, sample_id: str) -> None:
    """Remove the sample's image entry from the cache."""
    row = dataset.cache.row(sample_id)[1]
    assert dataset.cache.store.remove([row.images[0].key]) == 1
