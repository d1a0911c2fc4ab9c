"""Samples whose entries lie in memory: one object holds all that a batch needs of a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from latentcache.loading.sample import Wanted, told
from latentcache.store.base import Description, EntryArrays, Store
from latentcache.store.stacking import stack_columns
from latentcache.types import Batch

MAX_HELD = 1 << 17
"""Samples that are held, at some 700 bytes each, most of which the store shares. Beyond it all are forgotten, and
looked up again."""
_MAX_DESCRIPTIONS = 1024


class _Rows:
    """By caption and flip, then by sample_id: the caption, its layout, the description, and an array for each field
    (`EntryArrays.arrays`). They count as long as `generation` is the store's."""

    __slots__ = ("by_sample", "generation")

    def __init__(self, generation: int | None):
        self.generation = generation
        self.by_sample: dict[tuple[int, bool], dict[str, tuple[Any, ...]]] = {}

    def num(self) -> int:
        return sum(map(len, self.by_sample.values()))


class HeldSamples:
    """Samples that were read from `store`, for reading them again. Any thread may use it.

    Why one object for each: a batch's time beside its copies is cache misses, one for each object that is met.
    Packs that were compacted away are let go of with the next batch.
    """

    def __init__(self, store: Store):
        self._store = store
        self._rows = _Rows(None)

    def read(
        self, sample_ids: Sequence[str], caption: int, flip: bool, out: Mapping[str, torch.Tensor] | None
    ) -> Batch | None:
        """The batch, as `LatentCache.gather` gives it. None unless all samples are held, and lie in one bucket."""
        held = self._rows
        if held.generation is None or self._store.generation != held.generation:
            return None
        known = held.by_sample.get((caption, flip))
        if known is None:
            return None
        try:
            rows = [known[sample_id] for sample_id in sample_ids]
        except KeyError:
            return None
        if not rows:
            return None
        captions, layouts, descriptions, *columns = zip(*rows, strict=False)  # of other fields: seen by description
        facts = told(sample_ids, captions, layouts)
        description, buckets = descriptions[0], facts["target_size"]
        if descriptions.count(description) != len(rows) or buckets.count(buckets[0]) != len(rows):
            return None
        batch: Batch = stack_columns(description, columns, len(rows), out)
        batch.update(facts)
        return batch

    def now(self) -> _Rows:
        """What `keep` is given: samples that were looked up before `forget` are not held after it."""
        return self._rows

    def keep(self, since: _Rows, wanted: Sequence[Wanted], caption: int, flip: bool) -> None:
        """Hold these samples from now on, unless all were forgotten after `since`. Errors as for `Store.rows`.

        Nothing is held of a store that reads anew each time (`Store.generation` is None).
        """
        generation = self._store.generation  # first: what goes meanwhile changes it
        if generation is None:
            return
        held = since
        if held.generation != generation or held.num() + len(wanted) > MAX_HELD:
            held = _Rows(generation)  # a new one: a thread that fills the old one does no harm
        known = held.by_sample.setdefault((caption, flip), {})
        images = self._store.rows([item.image_key for item in wanted])
        texts = self._store.rows([item.caption_key for item in wanted])
        for item, image, text in zip(wanted, images, texts, strict=True):
            known[item.sample_id] = (item.caption, item.layout, *_joined(image, text))
        if self._rows is since:
            self._rows = held

    def num(self) -> int:
        """How many samples are held; one counts for each of its captions and flips."""
        return self._rows.num()

    def forget(self) -> None:
        """Let go of all."""
        self._rows = _Rows(None)


def _joined(image: EntryArrays, text: EntryArrays) -> tuple[Any, ...]:
    """The description of both entries' fields, in the order of their names, and the array of each."""
    fields = {
        name: (spec, part)
        for source in (image, text)
        for (name, spec), part in zip(source.description.items(), source.arrays, strict=True)
    }
    names = sorted(fields)
    return _description(*[(name, fields[name][0]) for name in names]), *[fields[name][1] for name in names]


@lru_cache(_MAX_DESCRIPTIONS)
def _description(*fields: tuple[str, tuple[str, tuple[int, ...]]]) -> Description:
    """Equal ones are the same object."""
    return dict(fields)
