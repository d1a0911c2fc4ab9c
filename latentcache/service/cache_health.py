"""What is wrong with a cache, and the precache that works on it now, as the page shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from latentcache.config import PROMPTS_PREFIX
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import LatentCacheError
from latentcache.precache.progress_note import RunNote, read_note
from latentcache.service.charts import percent_of
from latentcache.service.manifest_views import ManifestViews
from latentcache.store.disk import DiskStore

_CHUNK = 256  # rows
LISTED = 200
"""Rows that a table of the page shows, at most."""


@dataclass(frozen=True, slots=True)
class LackingSample:
    """A sample that lacks an entry, and why: the reason of the damage, or that it is not there."""

    dataset: str
    sample_id: str
    key: str
    reason: str

    @property
    def is_prompt(self) -> bool:
        """Whether it is a validation prompt, which has no page."""
        return self.dataset.startswith(PROMPTS_PREFIX)


@dataclass(frozen=True, slots=True)
class CacheHealth:
    """What is wrong with a cache. The lists have LISTED rows at most, the numbers count all.

    `num_unused` counts entries that no manifest refers to, `unused_damage` those of them that are damaged.
    """

    lacking: tuple[LackingSample, ...]
    num_lacking: int
    num_damaged: int
    unused_damage: Mapping[str, str]
    refused: Mapping[str, int]
    num_unverified: int
    num_unused: int
    problems: tuple[str, ...]

    @property
    def is_well(self) -> bool:
        """Whether there is nothing to fix."""
        return not (self.num_lacking or self.num_damaged or self.problems)


def health(store: DiskStore, views: ManifestViews) -> CacheHealth:
    """Look at every key of every manifest, prompts too. Reads no payload."""
    damaged = store.damaged()
    lacking: list[LackingSample] = []
    refused: Counter[str] = Counter()
    used_damage: set[str] = set()
    used: dict[str, np.ndarray] = {}  # by pack, which of its entries a manifest names: sets of all keys take a gigabyte
    problems: list[str] = []
    num_lacking = num_unverified = 0
    for name in views.manifests.names():
        try:
            view = views.view(name)
        except LatentCacheError as error:
            problems.append(str(error))
            continue
        for start in range(0, len(view.rows), _CHUNK):
            rows = view.rows.rows(start, start + _CHUNK)
            keys = [key for row in rows for key in row.keys()]
            present = _present(store, keys, used)
            used_damage.update(damaged.keys() & keys)
            for row in rows:
                if row.refusal is not None:
                    refused[row.refusal.reason] += 1
                    continue
                num_unverified += not row.is_verified
                missing = next((key for key in row.keys() if key not in present), None)
                if missing is not None:
                    num_lacking += 1
                    if len(lacking) < LISTED:
                        reason = damaged.get(missing, "the entry is not there")
                        lacking.append(LackingSample(name, row.sample_id, missing, reason))
    unused_damage = [(key, reason) for key, reason in damaged.items() if key not in used_damage]
    num_entries = sum(store.stats().num_entries.values())
    return CacheHealth(
        lacking=tuple(lacking),
        num_lacking=num_lacking,
        num_damaged=len(damaged),
        unused_damage=dict(unused_damage[:LISTED]),
        refused=dict(refused.most_common()),
        num_unverified=num_unverified,
        num_unused=max(0, num_entries - sum(int(flags.sum()) for flags in used.values())),
        problems=tuple(problems),
    )


def _present(store: DiskStore, keys: Sequence[str], used: dict[str, np.ndarray]) -> set[str]:
    """Choose the keys that are there. Their rows are set in `used`: by pack, bool [num_entries]."""
    packs, places = store.places(keys)
    is_there = places[:, 0] >= 0
    sizes = store.catalog.table.packs
    for number in np.unique(places[is_there, 0]).tolist():
        if (layout := sizes.get(packs[number])) is not None:
            flags = used.setdefault(packs[number], np.zeros(layout.num_entries, np.bool_))
            flags[places[places[:, 0] == number, 1]] = True
    return {key for key, there in zip(keys, is_there.tolist(), strict=True) if there}


@dataclass(frozen=True, slots=True)
class Running:
    """A precache that began and has not finished: which datasets, and how far it is.

    `note` is None where nobody knows how much there is to do. `seconds_left` is None before the first entry is there.
    """

    names: tuple[str, ...]
    begun: str
    note: RunNote | None
    num_done: int
    percent: float
    rate: float
    seconds_left: float | None


def running(store: DiskStore, manifests: ManifestFolder) -> Running | None:
    """The run that works on this cache, or that ended in the middle. None if there is none. DatasetError."""
    begun = manifests.unfinished()
    if not begun:
        return None
    note = read_note(store.path / "memo")
    first = min(begun.values())
    if note is None:
        return Running(tuple(begun), first, None, 0, 0.0, 0.0, None)
    num_done = note.num_done(sum(store.stats().num_entries.values()))
    rate = num_done / max(note.seconds(), 1e-3)
    left = (note.num_misses - num_done) / rate if rate else None
    return Running(tuple(begun), first, note, num_done, percent_of(num_done, note.num_misses), rate, left)
