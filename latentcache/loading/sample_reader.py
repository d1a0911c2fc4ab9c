"""Samples' entries read from a store and stacked: every way of reading goes through `SampleReader.gather`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from latentcache.errors import EntryDamagedError, EntryMissingError, SampleError, StoreError
from latentcache.loading.pinned_pool import BufferPool
from latentcache.loading.sample import PRECACHE, SampleMemory, SampleRef, joined_metadata
from latentcache.store.base import Description, EntryArrays, Store
from latentcache.store.stacking import common_fields, stack_columns
from latentcache.types import Batch, Size

_MAX_DESCRIPTIONS = 1024
# No Python function runs for a sample: a small batch is copied in the time of some calls.
_ROWS, _BOTH_KEYS, _keys = attrgetter("rows"), attrgetter("image_key", "text_key"), chain.from_iterable


class SampleReader:
    """Reads samples from `store`, each from its entries when it is first requested, and then from its `SampleRef.rows`.

    `memory` has the samples whose arrays are to be released when the store's generation changes, so that packs that
    were compacted away do not stay mapped. `path` of the cache is named in errors. Any thread may use a reader.
    """

    def __init__(self, store: Store, memory: SampleMemory, path: Path | None = None):
        self.store, self.path = store, path
        self._memory = memory
        self._generation: int | None = None

    def gather(
        self,
        refs: Sequence[SampleRef],
        *,
        pool: BufferPool | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
    ) -> Batch:
        """The stored tensors of B samples of one bucket, [B, *shape] for each field, on the CPU, and their metadata.

        They are written to the tensors of `out`, and others to a buffer of `pool` or to new memory. SampleError for a
        sample whose entry is missing or damaged; StoreError for mixed buckets, unequal shapes, and a tensor in `out`
        that does not fit.
        """
        if not refs:
            raise StoreError("no samples were requested: a batch has at least one")
        generation, num_rows = self.store.generation, len(refs)
        # Rows that were not read are shorter: then there are no columns.
        generations, *found = zip(*map(_ROWS, refs), strict=False)
        if generation is None or generations.count(generation) != num_rows:
            _check_bucket([ref.layout.target_size for ref in refs])
            _, *found = zip(*self._read(refs, generation), strict=False)
        else:
            # The texts are prefetched with the images, so that they come while the images are copied.
            self.store.prefetch(_keys(map(_BOTH_KEYS, refs)))
        sample_ids, captions, layouts, descriptions, *columns = found
        metadata = joined_metadata(sample_ids, captions, layouts)
        buckets, description = metadata["target_size"], descriptions[0]
        if buckets.count(buckets[0]) != num_rows:
            _check_bucket(buckets)
        if descriptions.count(description) != num_rows:
            self._refuse_unequal(refs)
        empty = None if pool is None else pool.borrow([column[0].nbytes * num_rows for column in columns])
        batch: Batch = stack_columns(description, columns, num_rows, out, empty)
        batch.update(metadata)
        return batch

    def _read(self, refs: Sequence[SampleRef], generation: int | None) -> list[tuple[Any, ...]]:
        """The rows of these samples. They are remembered unless the store's entries are read each time."""
        if generation != self._generation:
            self._generation = generation
            self._memory.release_rows()
        rows: dict[SampleRef, tuple[Any, ...]] = {}
        if generation is not None:
            rows = {ref: known for ref in refs if (known := ref.rows)[0] == generation}
        new = [ref for ref in dict.fromkeys(refs) if ref not in rows]
        with self.naming(new):
            found = self.store.rows([ref.image_key for ref in new] + [ref.text_key for ref in new])
        for ref, image, text in zip(new, found[: len(new)], found[len(new) :], strict=True):
            rows[ref] = (generation, ref.sample_id, ref.caption, ref.layout, *_joined(image, text))
            if generation is not None:
                ref.rows = rows[ref]
        return [rows[ref] for ref in refs]

    def _refuse_unequal(self, refs: Sequence[SampleRef]) -> None:
        for keys in ([ref.image_key for ref in refs], [ref.text_key for ref in refs]):
            with self.naming(refs):
                common_fields(keys, [row.description for row in self.store.rows(keys)], None)
        raise StoreError("entries of one batch must have the same fields; batch samples of one dataset")

    def prefetch(self, refs: Iterable[SampleRef]) -> None:
        """These samples are read soon: see `Store.prefetch`."""
        self.store.prefetch(_keys(map(_BOTH_KEYS, refs)))

    def describe(self, ref: SampleRef) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype name and shape of each field of a sample. SampleError as for `gather`."""
        with self.naming([ref]):
            return {**self.store.describe(ref.image_key), **self.store.describe(ref.text_key)}

    @contextmanager
    def naming(self, refs: Sequence[SampleRef]) -> Iterator[None]:
        """Errors about an entry become errors about the first of these samples that needs it."""
        try:
            yield
        except (EntryMissingError, EntryDamagedError) as error:
            keys = {key: ref.sample_id for ref in reversed(refs) for key in (ref.image_key, ref.text_key)}
            raise self.sample_error(error, keys.get(error.key, error.key)) from error

    def sample_error(self, error: EntryMissingError | EntryDamagedError, sample_id: str) -> SampleError:
        """The error about the sample, with its remedy."""
        if isinstance(error, EntryMissingError):
            return SampleError(sample_id, f"has no entry: {error.reason}", PRECACHE)
        mark = f"run `latentcache verify {self.path}`, then " if self.store.read_only else ""
        return SampleError(sample_id, f"is damaged: {error.reason}", mark + PRECACHE)


def _check_bucket(buckets: Sequence[tuple[int, int]]) -> None:
    if len(set(buckets)) > 1:
        names = sorted({str(Size(*bucket)) for bucket in buckets})
        raise StoreError(
            f"a batch has one bucket, but these samples lie in {', '.join(names)}: "
            "batch them with latentcache.BucketBatchSampler"
        )


def _joined(image: EntryArrays, text: EntryArrays) -> tuple[Any, ...]:
    """The description of both entries' fields, in the order of their names, and the array of each."""
    fields: dict[str, tuple[Any, Any]] = {}
    for entry in (image, text):
        fields.update(zip(entry.description, zip(entry.description.values(), entry.arrays, strict=True), strict=True))
    names = tuple(sorted(fields))
    specs, arrays = zip(*map(fields.__getitem__, names), strict=True)
    return _description(names, specs), *arrays


@lru_cache(_MAX_DESCRIPTIONS)
def _description(names: tuple[str, ...], specs: tuple[tuple[str, tuple[int, ...]], ...]) -> Description:
    """Equal ones are the same object."""
    return dict(zip(names, specs, strict=True))
