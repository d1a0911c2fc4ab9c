"""Samples whose entries lie in memory: one object holds all that a batch needs of a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from latentcache.retrieve.placing import Batch
from latentcache.retrieve.wanted import NUM_FACTS, Wanted, told
from latentcache.store.base import Description, Store
from latentcache.store.gather import stack_columns

_BUCKET = NUM_FACTS - 2  # target_size, among the facts
_MAX_DESCRIPTIONS = 1024


class _Rows:
    """By caption and flip, then by sample_id: facts, description, and the bytes of each field. They count as long as
    `version` is the store's."""

    __slots__ = ("by_sample", "num", "version")

    def __init__(self, version: object):
        self.version = version
        self.num = 0
        self.by_sample: dict[tuple[int, bool], dict[str, tuple[Any, ...]]] = {}


class HeldSamples:
    """Samples that were read from `store`, for reading them again. Any thread may use it.

    Why one object for each: a batch's time beside its copies is cache misses, one for each object that is met.
    At most `max_samples`: beyond it all are forgotten, and looked up again.
    """

    def __init__(self, store: Store, max_samples: int):
        self._store = store
        self._max = max_samples
        self._rows = _Rows(None)

    def read(
        self, sample_ids: Sequence[str], caption: int, flip: bool, out: Mapping[str, torch.Tensor] | None
    ) -> Batch | None:
        """The batch, as `LatentCache.gather` gives it. None unless all samples are held, and lie in one bucket."""
        rows = self._rows
        if self._store.version is not rows.version:
            return None
        known = rows.by_sample.get((caption, flip))
        if known is None:
            return None
        try:
            columns = list(zip(*[known[sample_id] for sample_id in sample_ids], strict=False))
        except KeyError:
            return None
        if not columns:
            return None
        descriptions, buckets, num_rows = columns[NUM_FACTS], columns[_BUCKET], len(sample_ids)
        description = descriptions[0]
        if descriptions.count(description) != num_rows or buckets.count(buckets[0]) != num_rows:
            return None
        batch: Batch = stack_columns(description, columns[NUM_FACTS + 1 :], num_rows, out)
        batch.update(told(sample_ids, columns[:NUM_FACTS]))
        return batch

    def keep(self, wanted: Sequence[Wanted], caption: int, flip: bool) -> None:
        """Hold these samples from now on. Errors as for `Store.sources`."""
        version = self._store.version  # first: what goes meanwhile changes it
        rows = self._rows
        if rows.version is not version or rows.num + len(wanted) > self._max:
            rows = self._rows = _Rows(version)  # a new one: a thread that fills the old one does no harm
        known = rows.by_sample.setdefault((caption, flip), {})
        images = self._store.sources([item.image_key for item in wanted])
        texts = self._store.sources([item.caption_key for item in wanted])
        for item, image, text in zip(wanted, images, texts, strict=True):
            description = _joined(*image.description.items(), *text.description.items())
            known[item.sample_id] = (*item.facts, description, *image.parts, *text.parts)
        rows.num += len(wanted)

    def forget(self) -> None:
        """Let go of all."""
        self._rows = _Rows(None)


@lru_cache(_MAX_DESCRIPTIONS)
def _joined(*fields: tuple[str, tuple[str, tuple[int, ...]]]) -> Description:
    """The fields of image and text together: equal ones are the same object."""
    return dict(fields)
