"""A cache as a whole: what it holds, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from latentcache.config import PROMPTS_PREFIX
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.row_table import RowTable, has_key, hex_of
from latentcache.errors import LatentCacheError
from latentcache.service.page.views import Gallery, Manifests
from latentcache.store.base import StoreStats
from latentcache.store.disk import DiskStore
from latentcache.types import Refusal

_KEYS = 4096
"""Keys that are in memory as text at once: those of a million samples take 100 MB."""
LISTED = 200
"""Rows that a table of the page shows, at most."""


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """One dataset: its manifest, or the `problem` for which it cannot be read."""

    name: str
    manifest: Manifest | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Overview:
    """The figures of the first view. `num_cut` counts samples with a caption that the text encoders cut off."""

    stats: StoreStats
    datasets: tuple[DatasetSummary, ...]
    num_samples: int
    num_refused: int
    num_uncaptioned: int
    num_cut: int


def overview(gallery: Gallery) -> Overview:
    """Count what the index, the manifests and the records say. A damaged manifest does not hide the others."""
    store, manifests = gallery.store, gallery.manifests
    datasets = []
    for name in manifests.dataset_names():
        try:
            datasets.append(DatasetSummary(name, manifests.get(name)))
        except LatentCacheError as error:
            datasets.append(DatasetSummary(name, None, str(error)))
    tables = [found.manifest.rows for found in datasets if found.manifest is not None]
    cut = gallery.cut_captions.flags_of
    return Overview(
        store.stats(),
        tuple(datasets),
        num_samples=sum(map(len, tables)),
        num_refused=sum(len(table.refusals) for table in tables),
        num_uncaptioned=sum(map(_num_uncaptioned, tables)),
        num_cut=sum(len(table.rows_with_captions(cut(table.columns["caption/keys"]))) for table in tables),
    )


def _num_uncaptioned(table: RowTable) -> int:
    """How many usable rows have no caption, or empty ones."""
    ends = table.columns["caption/text/offsets"][table.columns["caption/offsets"]]
    return int((ends[1:] == ends[:-1])[table.usable()].sum())


def _keys_of(table: RowTable, kind: str) -> Iterator[list[str]]:
    """The keys of a kind of entries (`image`, `caption`, `part`), some at a time."""
    digests = table.columns[f"{kind}/keys"]
    return (hex_of(digests[start : start + _KEYS]) for start in range(0, len(digests), _KEYS))


@dataclass(frozen=True, slots=True)
class FaultySample:
    """A sample that was refused, or lacks an entry: then `key` is the entry's, and `reason` says why."""

    dataset: str
    sample_id: str
    reason: str
    key: str = ""
    refusal: Refusal | None = None

    @property
    def is_prompt(self) -> bool:
        """Whether it is a validation prompt, which has no page."""
        return self.dataset.startswith(PROMPTS_PREFIX)


@dataclass(frozen=True, slots=True)
class CacheHealth:
    """What is wrong with a cache. The lists have LISTED rows at most, the numbers count all.

    `num_unused` counts entries that no manifest refers to, `unused_damage` those of them that are damaged.
    """

    lacking: Sequence[FaultySample]
    num_lacking: int
    num_damaged: int
    unused_damage: Mapping[str, str]
    refused: Sequence[FaultySample]
    num_refused: int
    num_unverified: int
    num_unused: int
    problems: Sequence[str]

    @property
    def is_well(self) -> bool:
        """Whether nothing is lost or damaged."""
        return not (self.num_lacking or self.num_damaged or self.problems)


def health(store: DiskStore, manifests: Manifests) -> CacheHealth:
    """Look at every key of every manifest, prompts too. Reads no payload."""
    damaged = store.damaged()
    lacking: list[FaultySample] = []
    refused: list[FaultySample] = []
    used_damage: set[str] = set()
    used: dict[str, np.ndarray] = {}  # by pack, which of its entries a manifest names: sets of all keys take a gigabyte
    problems: list[str] = []
    num_lacking = num_refused = num_unverified = 0
    for name in manifests.names():
        try:
            table = manifests.get(name).rows
        except LatentCacheError as error:
            problems.append(str(error))
            continue
        absent = dict[str, np.ndarray]()  # places of entries, by their kind
        for kind in ("image", "caption", "part"):
            flags = [np.zeros(0, np.bool_)]
            for keys in _keys_of(table, kind):
                flags.append(~_are_present(store, keys, used))
                used_damage.update(damaged.keys() & keys)
            absent[kind] = np.flatnonzero(np.concatenate(flags) & has_key(table.columns[f"{kind}/keys"]))
        lacks = np.setdiff1d(table.rows_of(absent), table.columns["refusal/rows"])
        num_lacking += len(lacks)
        num_unverified += len(np.intersect1d(table.unverified(), table.usable()))
        num_refused += len(table.refusals)
        for number in lacks[: LISTED - len(lacking)].tolist():
            row = table.row(number)
            there = _are_present(store, keys := [*row.keys()], used).tolist()
            for missing in [key for key, is_there in zip(keys, there, strict=True) if not is_there][:1]:
                reason = damaged.get(missing, "the entry is not there")
                lacking.append(FaultySample(name, row.sample_id, reason, missing))
        for number, refusal in islice(table.refusals.items(), LISTED - len(refused)):
            refused.append(FaultySample(name, table.sample_ids[number], refusal.reason, refusal=refusal))
    unused_damage = [(key, reason) for key, reason in damaged.items() if key not in used_damage]
    num_entries = sum(store.stats().num_entries.values())
    return CacheHealth(
        lacking=lacking,
        num_lacking=num_lacking,
        num_damaged=len(damaged),
        unused_damage=dict(unused_damage[:LISTED]),
        refused=refused,
        num_refused=num_refused,
        num_unverified=num_unverified,
        num_unused=max(0, num_entries - sum(int(flags.sum()) for flags in used.values())),
        problems=problems,
    )


def _are_present(store: DiskStore, keys: Sequence[str], used: dict[str, np.ndarray]) -> np.ndarray:
    """Which of the keys are there: bool [num_keys]. Their rows are set in `used`: by pack, bool [num_entries]."""
    packs, places = store.places(keys)
    is_there: np.ndarray = places[:, 0] >= 0
    sizes = store.table.packs
    for number in np.unique(places[is_there, 0]).tolist():
        if (layout := sizes.get(packs[number])) is not None:
            flags = used.setdefault(packs[number], np.zeros(layout.num_entries, np.bool_))
            flags[places[places[:, 0] == number, 1]] = True
    return is_there
