"""Batches of one bucket each, for a DataLoader's `batch_sampler`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from latentcache.errors import StoreError
from latentcache.retrieve.dataset import LatentDataset
from latentcache.types import Bucket


class BucketBatchSampler(Sampler[list[int]]):
    """Yields lists of item numbers, each list from one bucket. The order depends on `seed` and the epoch alone.

    `shuffle` mixes the items of each bucket and the batches. `drop_last` leaves out batches smaller than `batch_size`.
    Call `set_epoch` before each epoch, as with torch's DistributedSampler. With `world_size` ranks every rank gets
    the same number of batches: the last batches that do not go round are left out.
    """

    def __init__(
        self,
        dataset: LatentDataset,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ):
        if batch_size < 1:
            raise StoreError(f"batch_size is {batch_size}; it must be at least 1")
        if not 0 <= rank < world_size:
            raise StoreError(f"rank is {rank}; it must be at least 0 and less than world_size {world_size}")
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.epoch = 0
        self._buckets: dict[Bucket, list[int]] = {}
        for index in range(len(dataset)):
            self._buckets.setdefault(dataset.bucket(index), []).append(index)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self._num_batches() // self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        batches = [batch for bucket in sorted(self._buckets) for batch in self._split(bucket, generator)]
        if self.shuffle:
            batches = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
        whole = len(batches) // self.world_size * self.world_size
        yield from batches[self.rank : whole : self.world_size]

    def _split(self, bucket: Bucket, generator: torch.Generator) -> list[list[int]]:
        items = self._buckets[bucket]
        if self.shuffle:
            items = [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]
        batches = [items[start : start + self.batch_size] for start in range(0, len(items), self.batch_size)]
        return [batch for batch in batches if len(batch) == self.batch_size or not self.drop_last]

    def _num_batches(self) -> int:
        sizes = (len(items) for items in self._buckets.values())
        return sum(size // self.batch_size if self.drop_last else -(-size // self.batch_size) for size in sizes)
