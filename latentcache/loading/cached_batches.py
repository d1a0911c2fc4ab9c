"""Whole batches as the items of a map-style dataset, for a trainer that makes its DataLoader itself."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from latentcache.loading.loader import Output, check_output, placed
from latentcache.loading.sampler import BucketBatchSampler, PlannedBatch
from latentcache.store.batch import CPU
from latentcache.types import Batch


class CachedBatches(Dataset[Batch]):
    """The batches of an epoch of `sampler`, as items: item `n` is the n-th batch that a `LatentLoader` returns.

    For trainers that give a dataset of whole batches to a `DataLoader` of their own, with `batch_size=1` and a
    collator that unwraps it: kohya's sd-scripts, musubi-tuner. Such a DataLoader may have workers, each of which opens
    the cache for itself, and may shuffle, but then `order="packs"` of the dataset gains nothing. Where accelerate
    shares batches among ranks, leave the sampler at one rank.

    A batch is what `LatentLoader` returns, on the CPU: latents in `dtype` (default: as stored), `scaled` as the
    denoiser expects them, drawn from stored moments by the sampler's seed, the epoch and the batch's number.

    Args:
        sampler: The batches, with their dataset, seed, rank and number of ranks.
        dtype: Dtype of the floating-point tensors; None leaves them as they are stored.
        output: `latents`, `mean` or `moments`, as for `LatentLoader`.
        scaled: Whether the VAE's scaling is applied. A trainer that scales by itself wants False.

    Raises:
        StoreError: `output` is unknown, or moments are to be scaled.
    """

    def __init__(
        self,
        sampler: BucketBatchSampler,
        *,
        dtype: torch.dtype | None = None,
        output: Output = "latents",
        scaled: bool = False,
    ):
        check_output(output, scaled=scaled)
        self.sampler, self.dtype, self.output, self.scaled = sampler, dtype, output, scaled
        self._epoch = torch.tensor(sampler.epoch).share_memory_()  # also with workers that live for several epochs
        self._planned, self._plan = sampler.epoch, [*sampler.plan(sampler.epoch)]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches the items are, also in workers that run already.

        It costs nothing where the epoch is the present one.
        """
        self.sampler.set_epoch(epoch)
        self._epoch.fill_(epoch)
        self._batches()

    def __len__(self) -> int:
        """Batches of this rank in an epoch; the number is the same in each."""
        return len(self._batches())

    def __getitem__(self, number: int) -> Batch:
        """The batch of this number. SampleError for a sample of it that is missing or damaged; IndexError."""
        planned, dataset = self._batches()[number], self.sampler.dataset
        batch = dataset.cache.gather(dataset.refs(planned.visits))
        return placed(dataset, planned, batch, CPU, dtype=self.dtype, output=self.output, scaled=self.scaled)

    def _batches(self) -> list[PlannedBatch]:
        epoch = int(self._epoch)
        if epoch != self._planned:
            self._planned, self._plan = epoch, [*self.sampler.plan(epoch)]
        return self._plan
