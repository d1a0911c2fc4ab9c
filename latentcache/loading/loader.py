"""Batches for a training loop, read ahead in a thread, so that the loop does not wait for them."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from latentcache.devices.placement import DeviceLike, device_named, device_of, dtype_of
from latentcache.devices.transfer import MAX_IN_FLIGHT, Sent, Transfer, transfer_to
from latentcache.errors import SampleError, StoreError
from latentcache.loading.batch import Scaling, place
from latentcache.loading.cache import Allocate, LatentCache
from latentcache.loading.pinned_pool import BufferPool
from latentcache.loading.randomness import noise_generator
from latentcache.loading.resident import ResidentEntries
from latentcache.loading.sample import Wanted
from latentcache.loading.sampler import BucketBatchSampler, Cursor, PlannedBatch
from latentcache.types import Batch
from latentcache.utils.concurrency import Prefetcher

logger = logging.getLogger("latentcache")

Output = Literal["latents", "mean", "moments"]
LOOK_AHEAD = 4
"""Batches that are asked for before they are read, while what is read comes from the disk."""


class Gatherer(Protocol):
    """Where batches are gathered: the cache, or the entries that are held in memory."""

    def gather(self, wanted: Sequence[Wanted], *, allocate: Allocate | None = None) -> Batch: ...
    def prefetch(self, wanted: Iterable[Wanted]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Made:
    """A batch that was read, or None where all its samples were skipped; and what was skipped, with the reason."""

    planned: PlannedBatch
    sent: Sent | None
    skipped: Mapping[str, str]
    num_skipped: int


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes the batches of one iteration. It runs in the thread that reads ahead."""

    dataset: Any
    source: Gatherer
    pool: BufferPool
    transfer: Transfer
    dtype: torch.dtype | None
    output: Output
    scaling: Scaling | None
    seed: int
    skip: bool
    must_fill: bool
    known: set[str]

    def make_all(self, plan: Iterable[PlannedBatch]) -> Generator[_Made, None, None]:
        try:
            for planned in self._asked_for(plan):
                yield self._make(planned)  # kept in no variable: what is read next may take its buffer
        finally:
            self.transfer.finish()

    def _asked_for(self, plan: Iterable[PlannedBatch]) -> Iterator[PlannedBatch]:
        """The plan, of which the store has been asked for LOOK_AHEAD batches more than were given."""
        window: deque[PlannedBatch] = deque()
        for planned in plan:
            with suppress(StoreError):  # it comes up again with the batch that it belongs to
                self.source.prefetch(map(self.dataset.wanted, planned.items))
            window.append(planned)
            if len(window) > LOOK_AHEAD:
                yield window.popleft()
        yield from window

    def _make(self, planned: PlannedBatch) -> _Made:
        try:
            return self._read(planned)
        except Exception as error:
            items = ", ".join(map(str, planned.items[:16]))
            error.add_note(f"while reading batch {planned.position} of epoch {planned.epoch}, items {items}")
            raise

    def _read(self, planned: PlannedBatch) -> _Made:
        wanted = [self.dataset.wanted(item) for item in planned.items]
        skipped: dict[str, str] = {}
        while wanted:
            try:
                sent = self.transfer.send(self._reader(wanted), lambda batch: self._place(batch, planned))
                return _Made(planned, sent, skipped, len(planned.items) - len(wanted))
            except SampleError as error:
                if not self.skip:
                    raise
                wanted = self._without(wanted, error)
                skipped[error.sample_id] = error.reason
        if self.must_fill:
            sample_id, reason = next(iter(skipped.items()))
            remedy = "run `latentcache precache CONFIG` again: with several ranks no batch can be left out"
            raise SampleError(sample_id, f"{reason}, and no other sample is left in its batch", remedy)
        return _Made(planned, None, skipped, len(planned.items))

    def _reader(self, wanted: list[Wanted]) -> Callable[[], Batch]:
        return lambda: self.source.gather(wanted, allocate=self.pool.allocate)

    def _without(self, wanted: list[Wanted], error: SampleError) -> list[Wanted]:
        left = [item for item in wanted if item.sample_id != error.sample_id]
        if len(left) == len(wanted):
            raise error
        if error.sample_id not in self.known:
            self.known.add(error.sample_id)
            logger.warning("%s It is left out of its batches.", error)
        return left

    def _place(self, batch: Batch, planned: PlannedBatch) -> Batch:
        draws = self.output == "latents" and "moments" in batch
        return place(
            batch,
            self.transfer.device,
            dtype=self.dtype,
            output="moments" if self.output == "moments" else "latents",
            scaling=self.scaling,
            generator=noise_generator(self.seed, planned.epoch, planned.position) if draws else None,
        )


class LatentLoader:
    """Iterates over the batches of a `BucketBatchSampler` on the requesting device, `prefetch` batches ahead.

    A batch is what `LatentCache.batch` gives: tensors on the device, in its dtype, and lists. `output`: `latents` are
    drawn from moments anew at each visit (stored latents are as they are), `mean` is the moments' mean, `moments` are
    as stored. `scaled` applies the VAE's shift and scaling factor. All that is drawn follows from the sampler's seed,
    the epoch and the batch's position (`draws.noise_generator`), not from threads, ranks, `prefetch` or a resume.

    One thread reads whole batches into buffers that are used again (pinned, with copies on a stream of their own, where
    the device has streams; `BufferPool` and `devices/transfer.py` have the rules). Who holds a batch keeps it valid.
    Without `prefetch` the same is done in the calling thread. Device and dtype are those of the requester when an
    iteration begins. `resident` ("cpu" or a device) holds the whole dataset there once and gathers batches from it.

    An error comes up at the batch that it belongs to: SampleError for a sample that is missing or damaged. With
    `damaged="skip"` such samples are left out of their batches, which are then smaller; each is logged once and is in
    `skipped`. A batch of which nothing is left is left out, but an error with several ranks: all need as many.

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
        resident: str | torch.device | None = None,
    ):
        if prefetch < 0:
            raise StoreError(f"prefetch is {prefetch}; it must be at least 0 (0: no thread)")
        for name, value, allowed in (
            ("output", output, ("latents", "mean", "moments")),
            ("damaged", damaged, ("raise", "skip")),
        ):
            if value not in allowed:
                raise StoreError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
        if scaled and output == "moments":
            raise StoreError("moments are stored unscaled: ask for latents, or leave out scaled=True")
        self.sampler, self.dataset = sampler, sampler.dataset
        self.requester, self.dtype, self.output, self.scaled = device, dtype, output, scaled
        self.prefetch, self.damaged = prefetch, damaged
        self.skipped: dict[str, str] = {}
        self.num_skipped = 0
        self._known: set[str] = set()
        self._pool: BufferPool | None = None
        self._iterators: weakref.WeakSet[BatchIterator] = weakref.WeakSet()
        self._closed = False
        self.resident: ResidentEntries | None = None
        if resident is not None:
            where = device_named(str(resident))
            cache: LatentCache = self.dataset.cache
            self.resident = ResidentEntries(cache, self.dataset.all_wanted(), where, damaged=damaged)

    @property
    def device(self) -> torch.device:
        """The requesting device, on which batches are returned."""
        return device_of(self.requester)

    def __enter__(self) -> LatentLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        return len(self.sampler)

    def __iter__(self) -> BatchIterator:
        """One epoch: the sampler's present one, or what is left of it after `load_state_dict`."""
        return self._begin(endless=False)

    def forever(self) -> BatchIterator:
        """Epoch after epoch without end, from where the sampler is. The next one is read ahead too."""
        return self._begin(endless=True)

    def set_epoch(self, epoch: int) -> None:
        """As `BucketBatchSampler.set_epoch`."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state after the last batch that was handed out, whatever was read ahead."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, reshard: bool = False) -> None:
        """As `BucketBatchSampler.load_state_dict`; for iterations that begin afterwards."""
        self.sampler.load_state_dict(state, reshard=reshard)

    def close(self) -> None:
        """End all iterations and let go of buffers and resident entries. Batches that were handed out stay valid."""
        self._closed = True
        for iterator in list(self._iterators):
            iterator.close()
        self._pool = self.resident = None

    def _begin(self, *, endless: bool) -> BatchIterator:
        if self._closed:
            raise StoreError("the loader is closed; make a new one")
        if endless and not len(self.sampler):
            raise StoreError("an epoch has no batch: use a smaller batch_size, fewer ranks or drop_last=False")
        target = device_of(self.requester)
        transfer = transfer_to(target)
        if self._pool is None or self._pool.wanted_pin != transfer.overlaps:
            self._pool = BufferPool(pin=transfer.overlaps, num_idle=self.prefetch + MAX_IN_FLIGHT + 2)
        maker = _Maker(
            dataset=self.dataset,
            source=self.resident or self.dataset.cache,
            pool=self._pool,
            transfer=transfer,
            dtype=self.dtype or dtype_of(self.requester),
            output=self.output,
            scaling=self.dataset.scaling if self.scaled else None,
            seed=self.sampler.seed,
            skip=self.damaged == "skip",
            must_fill=self.sampler.world_size > 1,
            known=self._known,
        )
        cursor = self.sampler.begin()
        source = maker.make_all(_plan(self.sampler, cursor.epoch, cursor.position, endless))
        iterator = BatchIterator(self, Prefetcher(source, self.prefetch) if self.prefetch else source, transfer, cursor)
        self._iterators.add(iterator)
        return iterator


def _plan(sampler: BucketBatchSampler, epoch: int, position: int, endless: bool) -> Iterator[PlannedBatch]:
    yield from sampler.plan(epoch, position)
    while endless:
        epoch += 1
        yield from sampler.plan(epoch)


class BatchIterator(Iterator[Batch]):
    """One iteration of a `LatentLoader`. `close`, or dropping it, ends its thread."""

    def __init__(
        self,
        loader: LatentLoader,
        source: Prefetcher[_Made] | Generator[_Made, None, None],
        transfer: Transfer,
        cursor: Cursor,
    ):
        self._loader, self._source, self._transfer, self._cursor = loader, source, transfer, cursor
        self._error: Exception | None = None
        self._closed = False

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def how(self) -> str:
        """How batches get to the device, and why so."""
        return self._transfer.reason

    def __next__(self) -> Batch:
        if self._error is not None:
            raise self._error  # the batch that failed cannot be passed over: the epoch did not end there
        if self._closed:
            raise StoreError("this iteration was closed before its end; begin another with iter(loader)")
        while True:
            try:
                made = next(self._source)
            except StopIteration:
                raise
            except Exception as error:
                self._error = error
                raise
            batch = None if made.sent is None else self._transfer.receive(made.sent)
            self._loader.skipped.update(made.skipped)
            self._loader.num_skipped += made.num_skipped
            self._cursor.epoch, self._cursor.position = made.planned.epoch, made.planned.end
            if batch is not None:
                return batch

    def close(self) -> None:
        """End the thread and wait for it. It finishes the batch that it is reading."""
        self._closed = True
        self._source.close()
