"""Batches for a training loop, prefetched by a thread so that the loop does not wait for them."""

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
"""How many batches ahead the store is told to prefetch: in pack order that means whole packs, which take time."""
_TOGETHER = 64
"""Samples that are chosen and prefetched together, in at least four batches: one batch costs about as much."""
Encode = Callable[..., Any]
"""Encodes the entries of the keys `only` into the dataset's cache, and returns a `Report` with what it `refused`.

Use `partial(run_precache, config, models=models)`, which moves models back to where they were.
"""


class _Made(NamedTuple):
    """A batch that was read, or None if all its samples were skipped; and what was skipped, with the reason."""

    planned: PlannedBatch
    sent: Copies | None
    skipped: Mapping[str, SampleError]
    num_skipped: int


Source = Prefetcher[_Made] | Generator[_Made, None, None]


@dataclass(frozen=True, slots=True)
class _BatchMaker:
    """Reads the batches of one iteration. It runs in the prefetching thread."""

    loader: LatentLoader
    transfer: Transfer
    dtype: torch.dtype | None
    encoded: Set[str]
    """Keys of entries that this iteration has encoded already, and does not encode again."""

    def make_all(self, plan: Iterator[PlannedBatch]) -> Generator[_Made, None, None]:
        """Read the planned batches. Each is prefetched from the store LOOK_AHEAD batches before it is read."""
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
        """These batches with their samples, whose prefetch is requested.

        If one of the samples is an error there are no samples: the error is raised when its batch is read.
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
                    raise  # the training thread encodes it, so that no model moves while that thread computes
                error = self.loader.explained(problem)
                key = _lost_key(problem)  # another dataset may have a sample of this name
                left = [ref for ref in refs if ref.sample_id != error.sample_id or key not in ref.keys]
                if self.loader.damaged == "raise" or len(left) == len(refs):
                    raise error from problem.__cause__
                refs, skipped[error.sample_id] = left, error
        if self.loader.sampler.world_size > 1:
            error = next(iter(skipped.values()))
            remedy = f"{PRECACHE}: with several ranks no batch can be skipped"
            raise SampleError(error.sample_id, f"{error.reason}, and no other sample is left in its batch", remedy)
        return _Made(planned, None, skipped, len(planned.numbers))

    def _host_array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array in host memory from which the device can copy asynchronously."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return self.transfer.host_memory((num_bytes,), torch.uint8).numpy().view(dtype).reshape(shape)

    def _place(self, planned: PlannedBatch, batch: Batch) -> Batch:
        return placed(self.loader, planned, batch, self.transfer.device, self.dtype)


def _lost_key(error: Exception) -> str | None:
    """The key of the missing or damaged entry, if the error is a SampleError about one."""
    cause = error.__cause__ if isinstance(error, SampleError) else None
    return cause.key if isinstance(cause, EntryMissingError | EntryDamagedError) else None


def check_output(output: Output, *, scaled: bool) -> None:
    """StoreError for an unknown output, or one that cannot be scaled."""
    if output not in get_args(Output):
        raise StoreError(f"output is {output!r}; it must be one of {', '.join(get_args(Output))}")
    if scaled and output == "moments":
        raise StoreError("moments are stored unscaled: request latents, or leave out scaled=True")


def placed(
    of: LatentLoader | CachedBatches, planned: PlannedBatch, batch: Batch, device: DeviceLike, dtype: torch.dtype | None
) -> Batch:
    """Move a gathered batch `of` a loader to the device.

    Its latents are drawn by the seed, the epoch and the batch's position.
    """
    dataset, output = of.sampler.dataset, of.output
    draws = output == "latents" and "moments" in batch and dataset.facts.family.latent.draws
    return to_device(
        batch,
        device,
        dtype=dtype,
        output="moments" if output == "moments" else "latents",
        scaling=dataset.scaling if of.scaled else None,
        generator=noise_generator(planned.seed, planned.epoch, planned.position) if draws else None,
    )


class LatentLoader(Closing):
    """Iterates over the batches of a `BucketBatchSampler` on the requesting device, prefetching with one thread.

    A batch is what `LatentCache.batch` returns: tensors on the device, in its dtype, and lists. All random draws follow
    from the sampler's seed, the epoch and the batch's position (`sampler.noise_generator`), not from threads, ranks,
    `prefetch` or a resume. Device and dtype are those of the requesting module when an iteration begins. On a device
    with streams, batches are read into pinned memory and copied on a stream of their own (`devices.transfer`).

    An error is raised at the batch it belongs to: SampleError for a sample that is missing or damaged. Several
    iterations may run at once. Each ends its thread when it is exhausted, closed or dropped, and so does `close`.

    Args:
        sampler: The batches, with their dataset.
        device: The requesting device: a module, a tensor, a device or its name.
        dtype: Of floating-point tensors, by default the requesting module's.
        output: `latents` are drawn from moments at each visit, or are their mean if the family is trained on it; stored
            latents are returned as they are. `mean` is the moments' mean, `moments` are as stored.
        scaled: Apply the VAE's scaling.
        prefetch: How many batches the thread reads ahead; 0 reads in the calling thread.
        damaged: "skip" leaves missing and damaged samples out of their batches, which are then smaller. Each is logged
            once and listed in `skipped`. An empty batch is left out too, but is an error with several ranks, which all
            need the same number of batches.
        encode: Encodes what the cache lacks, in the thread that iterates: when an iteration begins, everything missing
            that the dataset's manifests list, in one pass; later, entries that are found missing or damaged, each once
            per iteration. The batches are those of a complete cache. What cannot be encoded is listed in `refused` and
            is a SampleError at its batch, as is a sample whose image, caption or models changed since the precache. If
            nothing is missing, an iteration costs one look-up.

    Raises:
        StoreError: An argument is not one of these.
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
            raise StoreError("a loader needs a sampler, not a dataset: LatentLoader(BucketBatchSampler(dataset, 4))")
        if prefetch < 0:
            raise StoreError(f"prefetch is {prefetch}; it must be at least 0 (0: no thread)")
        check_output(output, scaled=scaled)
        if damaged not in ("raise", "skip"):
            raise StoreError(f"damaged is {damaged!r}; it must be one of raise, skip")
        if not (encode is None or callable(encode)):
            needed = "functools.partial(run_precache, config, models=models)"
            raise StoreError(f"encode is a {type(encode).__name__}; it must be a function, such as {needed}")
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
        """The current epoch, or the rest of it after `load_state_dict`."""
        return self._begin(endless=False)

    def forever(self) -> BatchIterator:
        """Endless epochs, from the sampler's current position. The next epoch is prefetched too.

        StoreError if the dataset has no items.
        """
        return self._begin(endless=True)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch: see `BucketBatchSampler.set_epoch`."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state after the last batch that was returned. Prefetched batches do not count."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state in the next iteration; see `BucketBatchSampler.load_state_dict`."""
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
            raise StoreError(f"{self.dataset.path}: the dataset has no items, so an epoch has no batch")
        self.encode_missing()
        iterator = BatchIterator(self, self.sampler.begin(), endless=endless)
        self._iterators.add(iterator)
        return iterator

    def read_from(self, cursor: Cursor, encoded: Set[str], *, endless: bool) -> tuple[Source, Transfer]:
        """The batches from the cursor on, and their transfer. Entries of `encoded` are not encoded again."""
        transfer = transfer_to(device_of(self.requester))
        maker = _BatchMaker(self, transfer, self.dtype or dtype_of(self.requester), encoded)
        plan = self.sampler.plan(cursor.epoch, cursor.position)
        if endless:
            plan = chain(plan, chain.from_iterable(map(self.sampler.plan, count(cursor.epoch + 1))))
        batches = maker.make_all(plan)
        return (Prefetcher(batches, self.prefetch) if self.prefetch else batches), transfer

    def encode_missing(self, *keys: str) -> None:
        """Encode everything that the dataset's manifests list but the cache lacks, and the entries of these keys."""
        if self.encode is None or not (wanted := (self.dataset.missing() | {*keys}) - self._not_made):
            return
        logger.info("encoding %d entries that %s lacks", len(wanted), self.dataset.path)
        self.refused |= {refusal.sample_id: refusal for refusal in self.encode(only=wanted).refused}
        self._not_made |= wanted - self.dataset.cache.store.find(wanted)  # not retried in every epoch

    def lost_key(self, error: Exception, encoded: Set[str]) -> str | None:
        """The key of the missing or damaged entry that this error is about, if it may be encoded; else None."""
        key = _lost_key(error)
        return None if self.encode is None or key in encoded or key in self._not_made else key

    def explained(self, error: SampleError) -> SampleError:
        """The error itself, or one that says why the sample could not be encoded."""
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
            raise self._error  # a failed batch must not be skipped, nor taken for the end of the epoch
        if self._closed:
            raise StoreError("this iteration was closed before its end; start another with iter(loader)")
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
                    logger.warning("%s It is skipped.", lost)
                self._loader.skipped[sample_id] = lost.reason
            self._loader.num_skipped += made.num_skipped
            self._cursor.epoch, self._cursor.position = made.planned.epoch, made.planned.end
            if batch is not None:
                return batch

    def _encode(self, error: Exception) -> bool:
        """Encode the entry that this error is about, if that may help, and continue from the batch that failed."""
        loader, key = self._loader, self._loader.lost_key(error, self._encoded)
        if key is None:
            return False
        self._source.close()
        self._encoded.add(key)
        loader.encode_missing(key)
        self._source, self._transfer = loader.read_from(self._cursor, self._encoded, endless=self._endless)
        return True

    def close(self) -> None:
        """Stop the thread and wait for it; it finishes the batch that it is reading."""
        self._closed = True
        self._source.close()


class CachedBatches(Dataset[Batch]):
    """A dataset whose items are the batches of an epoch: item `n` is the n-th batch that a `LatentLoader` returns.

    It is for trainers that pass a dataset of whole batches to a `DataLoader` of their own, with `batch_size=1` and a
    collator that unwraps it: kohya's sd-scripts, musubi-tuner. The DataLoader may have workers, each of which opens the
    cache for itself. It may shuffle, but then the dataset's `order="packs"` gains nothing. If accelerate distributes
    the batches among ranks, leave the sampler at one rank.

    A batch is what `LatentLoader` returns, on the CPU: latents in `dtype` (by default as stored), with `scaled` as the
    denoiser expects them, drawn from stored moments by the sampler's seed, the epoch and the batch's number.

    Args:
        sampler: The batches, with their dataset, seed, rank and number of ranks.
        dtype: Dtype of the floating-point tensors; None leaves them as they are stored.
        output: `latents`, `mean` or `moments`, as for `LatentLoader`.
        scaled: Whether the VAE's scaling is applied; leave it False for a trainer that scales.

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
        self._epoch = torch.tensor(sampler.epoch).share_memory_()  # so that persistent workers see it
        self._planned, self._plan = sampler.epoch, [*sampler.plan(sampler.epoch)]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches the items are, also in running workers. A no-op for the current epoch."""
        self.sampler.set_epoch(epoch)
        self._epoch.fill_(epoch)
        self._batches()

    def __len__(self) -> int:
        """Batches of this rank per epoch."""
        return len(self._batches())

    def __getitem__(self, number: int) -> Batch:
        """The batch of this number. IndexError; SampleError for a sample that is missing or damaged."""
        planned, dataset = self._batches()[number], self.sampler.dataset
        batch = dataset.cache.gather(dataset.refs(planned.visits))
        return placed(self, planned, batch, CPU, self.dtype)

    def _batches(self) -> list[PlannedBatch]:
        epoch = int(self._epoch)
        if epoch != self._planned:
            self._planned, self._plan = epoch, [*self.sampler.plan(epoch)]
        return self._plan
