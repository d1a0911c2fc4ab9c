"""Batches for a training loop, prefetched by a thread, so that the loop does not wait for them."""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch.utils.data import Dataset

from latentcache.devices.placement import DeviceLike, device_of, dtype_of
from latentcache.devices.transfer import Copies, Transfer, transfer_to
from latentcache.errors import EntryDamagedError, EntryMissingError, SampleError, StoreError, add_note
from latentcache.loading.batch import to_device
from latentcache.loading.dataset import LatentDataset
from latentcache.loading.sample import PRECACHE, SampleRef
from latentcache.loading.sampler import BucketBatchSampler, Cursor, PlannedBatch, Visits, noise_generator
from latentcache.store.base import Closing
from latentcache.store.batch import CPU
from latentcache.types import Batch, Refusal
from latentcache.utils.concurrency import Prefetcher

logger = logging.getLogger("latentcache")

Output = Literal["latents", "mean", "moments"]
LOOK_AHEAD = 32
"""Each batch is prefetched from the store while so many before it are read: in pack order a pack, which takes time."""
_TOGETHER = 64
"""Samples that are chosen and prefetched at once, in at least four batches: it costs about as much for one batch."""
Encode = Callable[..., Any]
"""Encodes the entries of the keys `only` into the dataset's cache, and returns a `Report` with those that it `refused`.

Models return to where they were: `partial(run_precache, config, models=models)`.
"""


class _Made(NamedTuple):
    """A batch that was read, or None where all its samples were skipped; and what was skipped, with the reason."""

    planned: PlannedBatch
    sent: Copies | None
    skipped: Mapping[str, SampleError]
    num_skipped: int


Source = Prefetcher[_Made] | Generator[_Made, None, None]


@dataclass(frozen=True, slots=True)
class _BatchMaker:
    """Makes the batches of one iteration. It runs in the thread that prefetches."""

    loader: LatentLoader
    transfer: Transfer
    dtype: torch.dtype | None
    encoded: Set[str]
    """Keys of entries that are not encoded once more in this iteration."""

    def make_all(self, plan: Iterator[PlannedBatch]) -> Generator[_Made, None, None]:
        """The planned batches. Each is prefetched before the LOOK_AHEAD batches before it are read."""
        waiting: deque[tuple[PlannedBatch, list[SampleRef]]] = deque()
        num = max(4, _TOGETHER // self.loader.sampler.batch_size)
        try:
            while together := [*islice(plan, num)]:
                waiting += self._announced(together)
                while len(waiting) > LOOK_AHEAD:
                    yield self._make(*waiting.popleft())
            while waiting:
                yield self._make(*waiting.popleft())
        finally:
            self.transfer.finish()

    def _announced(self, batches: Sequence[PlannedBatch]) -> Iterator[tuple[PlannedBatch, list[SampleRef]]]:
        """These batches with their samples, which are read soon.

        Without samples where one is wrong, which is raised when its batch is read.
        """
        dataset = self.loader.dataset
        refs: list[SampleRef] = []
        with suppress(StoreError):
            refs = self._refs(batches)
            dataset.cache.prefetch(refs, whole_packs=dataset.order == "packs")
        each = iter(refs)
        return ((planned, [*islice(each, len(planned.numbers))]) for planned in batches)

    def _refs(self, batches: Sequence[PlannedBatch]) -> list[SampleRef]:
        dataset = self.loader.dataset
        if dataset.draws:
            columns = zip(*[planned.visits for planned in batches], strict=True)
            return dataset.refs(Visits(*map(np.concatenate, columns)))
        return dataset.refs(Visits.of([*chain.from_iterable(each.numbers for each in batches)], are_drawn=False))

    def _make(self, planned: PlannedBatch, refs: list[SampleRef]) -> _Made:
        try:
            return self._read(planned, refs or self._refs([planned]))
        except Exception as error:
            items = ", ".join(map(str, planned.numbers[:16]))
            add_note(error, f"while reading batch {planned.position} of epoch {planned.epoch}, items {items}")
            raise

    def _read(self, planned: PlannedBatch, refs: list[SampleRef]) -> _Made:
        skipped: dict[str, SampleError] = {}
        memory = self._host_array if self.transfer.overlaps else np.empty
        while refs:
            try:
                read = partial(self.loader.dataset.cache.gather, refs, memory=memory)
                sent = self.transfer.send(read, partial(self._place, planned))
                return _Made(planned, sent, skipped, len(planned.numbers) - len(refs))
            except SampleError as problem:
                if self.loader.lost_key(problem, self.encoded) is not None:
                    raise  # the thread that trains encodes it: no model moves while that one computes
                error = self.loader.explained(problem)
                key = _lost_key(problem)  # another dataset may have a sample of this name
                left = [ref for ref in refs if ref.sample_id != error.sample_id or key not in ref.keys]
                if self.loader.damaged == "raise" or len(left) == len(refs):
                    raise error from problem.__cause__
                refs, skipped[error.sample_id] = left, error
        if self.loader.sampler.world_size > 1:
            error = next(iter(skipped.values()))
            remedy = f"{PRECACHE}: with several ranks no batch can be left out"
            raise SampleError(error.sample_id, f"{error.reason}, and no other sample is left in its batch", remedy)
        return _Made(planned, None, skipped, len(planned.numbers))

    def _host_array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array in memory that copies to the device need not wait for."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return self.transfer.host_memory((num_bytes,), torch.uint8).numpy().view(dtype).reshape(shape)

    def _place(self, planned: PlannedBatch, batch: Batch) -> Batch:
        loader = self.loader
        device, output, scaled = self.transfer.device, loader.output, loader.scaled
        return placed(loader.dataset, planned, batch, device, dtype=self.dtype, output=output, scaled=scaled)


def _lost_key(error: Exception) -> str | None:
    """The key of the entry that is missing or damaged, of a sample's error about that."""
    cause = error.__cause__ if isinstance(error, SampleError) else None
    return cause.key if isinstance(cause, EntryMissingError | EntryDamagedError) else None


def check_output(output: Output, *, scaled: bool) -> None:
    """StoreError for an output that there is not, or that cannot be scaled."""
    if output not in get_args(Output):
        raise StoreError(f"output is {output!r}; it must be one of {', '.join(get_args(Output))}")
    if scaled and output == "moments":
        raise StoreError("moments are stored unscaled: request latents, or leave out scaled=True")


def placed(
    dataset: LatentDataset,
    planned: PlannedBatch,
    batch: Batch,
    device: DeviceLike,
    *,
    dtype: torch.dtype | None,
    output: Output,
    scaled: bool,
) -> Batch:
    """A planned batch that was gathered, on the device; what is drawn follows from the seed, epoch and position."""
    draws = output == "latents" and "moments" in batch and dataset.facts.family.latent.draws
    return to_device(
        batch,
        device,
        dtype=dtype,
        output="moments" if output == "moments" else "latents",
        scaling=dataset.scaling if scaled else None,
        generator=noise_generator(planned.seed, planned.epoch, planned.position) if draws else None,
    )


class LatentLoader(Closing):
    """Iterates over the batches of a `BucketBatchSampler` on the requesting device, `prefetch` batches ahead.

    A batch is what `LatentCache.batch` gives: tensors on the device, in its dtype, and lists. `output`: `latents` are
    drawn from moments at each visit, or are their mean where the family is trained with it (stored latents are as they
    are), `mean` is the moments' mean, `moments` are as stored. `scaled` applies the VAE's scaling. All that is drawn
    follows from the sampler's seed, the epoch and the batch's position (`sampler.noise_generator`), not from threads,
    ranks, `prefetch` or a resume.

    One thread reads whole batches (into pinned memory, with copies on a stream for them, where the device has streams:
    `devices.transfer`). Without `prefetch` the calling thread does the same. Device and dtype are those of the
    requesting module when an iteration begins.

    An error is raised at the batch that it belongs to: SampleError for a sample that is missing or damaged. With
    `damaged="skip"` such samples are left out of their batches, which are then smaller; each is logged once and is in
    `skipped`. An empty batch is left out too, but is an error with several ranks: all need the same number of batches.

    `encode` encodes what the cache has not: when an iteration begins, all that the dataset's manifests list and is
    missing, in one pass; later an entry that is found missing or damaged, once in an iteration. The thread that
    iterates does it, and the batches are those of a complete cache. What cannot be encoded is in `refused`, and a
    SampleError at its batch, as is a sample whose image, caption or models changed since the precache. Without
    anything missing an iteration costs one look-up.

    Iterations may be several at once. Each ends its thread when it is exhausted, closed or dropped, as does `close`.
    """

    def __init__(
        self,
        sampler: BucketBatchSampler,
        *,
        device: DeviceLike,
        dtype: torch.dtype | None = None,
        output: Output = "latents",
        scaled: bool = False,
        prefetch: int = 2,
        damaged: Literal["raise", "skip"] = "raise",
        encode: Encode | None = None,
    ):
        if isinstance(sampler, LatentDataset):
            raise StoreError(
                "a loader takes a sampler, which says what a batch is: LatentLoader(BucketBatchSampler(dataset, 4))"
            )
        if prefetch < 0:
            raise StoreError(f"prefetch is {prefetch}; it must be at least 0 (0: no thread)")
        check_output(output, scaled=scaled)
        if damaged not in ("raise", "skip"):
            raise StoreError(f"damaged is {damaged!r}; it must be one of raise, skip")
        if not (encode is None or callable(encode)):
            needed = "functools.partial(run_precache, config, models=models)"
            raise StoreError(f"encode is a {type(encode).__name__}; it is called to encode entries: give {needed}")
        self.sampler = sampler
        self.dataset = sampler.dataset
        self.requester, self.dtype, self.output, self.scaled = device, dtype, output, scaled
        self.prefetch, self.damaged, self.encode = prefetch, damaged, encode
        self.refused: dict[str, Refusal] = {}
        self._not_made = set[str]()
        self.skipped: dict[str, str] = {}
        self.num_skipped = 0
        self._iterators: weakref.WeakSet[BatchIterator] = weakref.WeakSet()
        self._closed = False

    @property
    def device(self) -> torch.device:
        """The requesting device, on which batches are returned."""
        return device_of(self.requester)

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        return len(self.sampler)

    def __iter__(self) -> BatchIterator:
        """The present epoch, or what is left of it after `load_state_dict`."""
        return self._begin(endless=False)

    def forever(self) -> BatchIterator:
        """Epoch after epoch without end, from where the sampler is. The next epoch is prefetched too.

        StoreError: the dataset has no items.
        """
        return self._begin(endless=True)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch: see `BucketBatchSampler.set_epoch`."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state after the last batch that was returned. Prefetched batches do not count."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state (see `BucketBatchSampler.load_state_dict`), in iterations that begin afterwards."""
        self.sampler.load_state_dict(state)

    def close(self) -> None:
        """End all iterations. Batches that were returned stay valid."""
        self._closed = True
        for iterator in list(self._iterators):
            iterator.close()

    def _begin(self, *, endless: bool) -> BatchIterator:
        if self._closed:
            raise StoreError("the loader is closed; make a new one")
        if endless and not len(self.sampler):
            raise StoreError(f"{self.dataset.path}: the dataset has no items, so that an epoch has no batch")
        self.encode_missing()
        iterator = BatchIterator(self, self.sampler.begin(), endless=endless)
        self._iterators.add(iterator)
        return iterator

    def read_from(self, cursor: Cursor, encoded: Set[str], *, endless: bool) -> tuple[Source, Transfer]:
        """The batches from here on, and how they get to the device. Entries of `encoded` are not encoded again."""
        transfer = transfer_to(device_of(self.requester))
        maker = _BatchMaker(self, transfer, self.dtype or dtype_of(self.requester), encoded)
        plan = self.sampler.plan(cursor.epoch, cursor.position)
        if endless:
            plan = chain(plan, chain.from_iterable(map(self.sampler.plan, count(cursor.epoch + 1))))
        batches = maker.make_all(plan)
        return (Prefetcher(batches, self.prefetch) if self.prefetch else batches), transfer

    def encode_missing(self, *keys: str) -> None:
        """Encode all that the dataset's manifests list and the cache has not, and the entries of these keys."""
        if self.encode is None or not (wanted := (self.dataset.missing() | {*keys}) - self._not_made):
            return
        logger.info("encoding %d entries that %s has not", len(wanted), self.dataset.path)
        self.refused |= {refusal.sample_id: refusal for refusal in self.encode(only=wanted).refused}
        self._not_made |= wanted - self.dataset.cache.store.find(wanted)  # not tried in each epoch

    def lost_key(self, error: Exception, encoded: Set[str]) -> str | None:
        """The key of the missing or damaged entry that this error is about, and that may be encoded; else None."""
        key = _lost_key(error)
        return None if self.encode is None or key in encoded or key in self._not_made else key

    def explained(self, error: SampleError) -> SampleError:
        """The error, or another one that says why the sample could not be encoded."""
        refusal = self.refused.get(error.sample_id)
        if refusal is None or _lost_key(error) not in self._not_made:
            return error
        reason = f"{error.reason}, and it cannot be encoded ({refusal.reason}): {refusal.detail}"
        remedy = PRECACHE if refusal.reason == "changed" else f"replace {refusal.path}, then {PRECACHE}"
        return SampleError(error.sample_id, reason, remedy)


class BatchIterator(Iterator[Batch], Closing):
    """One iteration of a `LatentLoader`. `close`, or dropping it, ends its thread."""

    def __init__(self, loader: LatentLoader, cursor: Cursor, *, endless: bool):
        self._loader, self._cursor, self._endless = loader, cursor, endless
        self._encoded = set[str]()
        self._source, self._transfer = loader.read_from(cursor, self._encoded, endless=endless)
        self._error: Exception | None = None
        self._closed = False

    def __next__(self) -> Batch:
        if self._error is not None:
            raise self._error  # the batch that failed cannot be passed over: the epoch did not end there
        if self._closed:
            raise StoreError("this iteration was closed before its end; begin another with iter(loader)")
        while True:
            try:
                made = next(self._source)
            except Exception as error:
                self._error = None if isinstance(error, StopIteration) else error
                if not self._encode(error):
                    raise
                self._error = None
                continue
            batch = None if made.sent is None else self._transfer.receive(made.sent)
            for sample_id, lost in made.skipped.items():
                if sample_id not in self._loader.skipped:
                    logger.warning("%s It is left out of its batches.", lost)
                self._loader.skipped[sample_id] = lost.reason
            self._loader.num_skipped += made.num_skipped
            self._cursor.epoch, self._cursor.position = made.planned.epoch, made.planned.end
            if batch is not None:
                return batch

    def _encode(self, error: Exception) -> bool:
        """Encode the entry that this error is about, if that may help, and read on from the batch that failed."""
        loader, key = self._loader, self._loader.lost_key(error, self._encoded)
        if key is None:
            return False
        self._source.close()
        self._encoded.add(key)
        loader.encode_missing(key)
        self._source, self._transfer = loader.read_from(self._cursor, self._encoded, endless=self._endless)
        return True

    def close(self) -> None:
        """End the thread and wait for it. It finishes the batch that it is reading."""
        self._closed = True
        self._source.close()


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
