"""Entries as flat arrays, sorted by key: 80 bytes or so for each, and a batch of keys is found in some microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from latentcache.store.base import check_key
from latentcache.store.location import Location, Spec

KEY_CHARS = 64
KEY_WORDS = 4
_DIGEST_BYTES = 16
_WORD = np.dtype("<u8")

COLUMNS = {
    "keys": (_WORD, KEY_WORDS),
    "digests": (np.dtype("u1"), _DIGEST_BYTES),
    "packs": (np.dtype("<u4"), 1),
    "specs": (np.dtype("<u4"), 1),
    "starts": (np.dtype("<i8"), 1),
    "ages": (np.dtype("<u4"), 1),
}
"""Each column's dtype and its values per entry. `offsets` has one more value per field of each entry."""
OFFSET = np.dtype("<i8")
MAX_ENTRIES = (1 << 32) - 1


def key_words(keys: Sequence[str]) -> np.ndarray:
    """Keys as words [n * KEY_WORDS] that sort as they do. StoreError for one that is no key."""
    # One conversion for all: each on its own takes ten times as long.
    try:
        text = "".join(keys)
        data = bytes.fromhex(text)
        # fromhex is more liberal than a key is.
        good = data.hex() == text and set(map(len, keys)) <= {KEY_CHARS}
    except (ValueError, TypeError):
        good = False
    if not good:
        for key in keys:
            check_key(key)
    return np.frombuffer(data, ">u8").astype(np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class EntryTable:
    """Immutable. `keys` [n, KEY_WORDS] ascend; offsets of an entry begin at `starts[i]`, one per field of its spec.

    `ages` order the entries as the index does, oldest first. `first_words` are `keys[:, 0]`, to search in.
    """

    keys: np.ndarray
    digests: np.ndarray
    packs: np.ndarray
    specs: np.ndarray
    starts: np.ndarray
    ages: np.ndarray
    offsets: np.ndarray
    pack_ids: tuple[str, ...]
    spec_list: tuple[Spec, ...]
    first_words: np.ndarray

    @classmethod
    def empty(cls) -> EntryTable:
        return TableBuilder().build()

    def __len__(self) -> int:
        return len(self.first_words)

    def positions(self, words: np.ndarray) -> np.ndarray:
        """Where the keys are (`key_words`): int64 [n], and -1 for a key that is not there."""
        if not len(self):
            return np.full(len(words) // KEY_WORDS, -1, dtype=np.int64)
        at = self.first_words.searchsorted(words[::KEY_WORDS])
        found = self.keys.take(at, axis=0, mode="clip")
        if found.tobytes() == words.tobytes():
            return at
        wanted = words.reshape(-1, KEY_WORDS)
        at = np.where((found == wanted).all(axis=1), at, -1)
        for number in np.flatnonzero(at < 0).tolist():
            at[number] = self._position(wanted[number])
        return at

    def _position(self, key: np.ndarray) -> int:
        """As `positions`, also where many keys share their first word."""
        at, end = (int(self.first_words.searchsorted(key[0], side)) for side in ("left", "right"))
        while at < end:
            if (self.keys[at] == key).all():
                return at
            at += 1
        return -1

    def location(self, position: int) -> Location:
        spec = self.spec_list[self.specs[position]]
        start = int(self.starts[position])
        offsets = tuple(self.offsets[start : start + len(spec.sizes)].tolist())
        return Location(self.pack_ids[self.packs[position]], self.digests[position].tobytes().hex(), spec, offsets)

    def oldest_first(self, shown: np.ndarray) -> np.ndarray:
        """The positions at which `shown` [n] is true, by age."""
        positions = np.flatnonzero(shown)
        return positions[self.ages[positions].argsort(kind="stable")]

    def names(self, positions: np.ndarray) -> Iterator[str]:
        """The keys at these positions."""
        for start in range(0, len(positions), 1 << 16):
            text = self.keys[positions[start : start + (1 << 16)]].astype(">u8").tobytes().hex()
            yield from (text[at : at + KEY_CHARS] for at in range(0, len(text), KEY_CHARS))


class TableBuilder:
    """Gathers entries, in the order of their ages, and makes a table of them. Of two with one key the later counts."""

    def __init__(self) -> None:
        self._parts: dict[str, list[np.ndarray]] = {
            name: [] for name in ("keys", "digests", "packs", "specs", "offsets")
        }
        self._pack_ids: dict[str, int] = {}
        self._spec_list: dict[tuple[Any, ...], tuple[Spec, int]] = {}
        self._spec_numbers: dict[int, tuple[Spec, int]] = {}

    def extend(self, keys: Sequence[str], places: Iterable[tuple[str, str, Spec, Sequence[int]]]) -> None:
        """Add entries: pack, digest, spec and offsets of each key. StoreError for a key that is none."""
        pack_numbers, digests, spec_numbers, all_offsets = [], [], [], []
        pack_ids = self._pack_ids
        # No list of places: the garbage collector would look through it again and again.
        for pack, digest, spec, offsets in places:
            pack_numbers.append(pack_ids.setdefault(pack, len(pack_ids)))
            digests.append(digest)
            spec_numbers.append(self._spec_number(spec))
            all_offsets += offsets
        self._append(
            keys=key_words(keys).reshape(-1, KEY_WORDS),
            digests=np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(-1, _DIGEST_BYTES),
            packs=pack_numbers,
            specs=spec_numbers,
            offsets=all_offsets,
        )

    def extend_from(self, table: EntryTable, positions: np.ndarray) -> None:
        """Add entries of a table."""
        packs, specs = table.packs[positions], table.specs[positions]
        pack_numbers, spec_numbers = np.zeros(len(table.pack_ids), "<u4"), np.zeros(len(table.spec_list), "<u4")
        for old in np.unique(packs).tolist():
            pack_numbers[old] = self._pack_ids.setdefault(table.pack_ids[old], len(self._pack_ids))
        for old in np.unique(specs).tolist():
            spec_numbers[old] = self._spec_number(table.spec_list[old])
        counts = num_offsets(specs, table.spec_list)
        ends = counts.cumsum()
        places = np.repeat(table.starts[positions] - (ends - counts), counts) + np.arange(counts.sum())
        self._append(
            keys=table.keys[positions],
            digests=table.digests[positions],
            packs=pack_numbers[packs],
            specs=spec_numbers[specs],
            offsets=table.offsets[places],
        )

    def _append(self, **values: np.ndarray | list[int]) -> None:
        for name, value in values.items():
            dtype = OFFSET if name == "offsets" else COLUMNS[name][0]
            self._parts[name].append(np.asarray(value, dtype=dtype))

    def _spec_number(self, spec: Spec) -> int:
        # Equal specs are nearly always one object, and a spec has no hash. The reference keeps its id its own.
        known = self._spec_numbers.get(id(spec))
        if known is None:
            # Two that list their fields in another order are two: offsets follow that order.
            contents = spec.kind, tuple(spec.description.items())
            known = spec, self._spec_list.setdefault(contents, (spec, len(self._spec_list)))[1]
            self._spec_numbers[id(spec)] = known
        return known[1]

    def build(self) -> EntryTable:
        """The table. The builder is empty afterwards, so that there is never a second copy of everything."""
        columns = {name: self._joined(name) for name in ("packs", "specs", "offsets")}
        keys = self._joined("keys")
        order = _sorted(keys)
        if len(order) > MAX_ENTRIES:
            raise OverflowError(f"{len(order):,} entries; one table holds at most {MAX_ENTRIES:,}")
        specs = tuple(spec for spec, _ in self._spec_list.values())
        counts = num_offsets(columns["specs"], specs)
        keys = keys[order]
        return EntryTable(
            keys=keys,
            digests=self._joined("digests")[order],
            packs=columns["packs"][order],
            specs=columns["specs"][order],
            starts=(counts.cumsum() - counts)[order],
            ages=order.astype("<u4"),
            offsets=columns["offsets"],
            pack_ids=tuple(self._pack_ids),
            spec_list=specs,
            first_words=np.ascontiguousarray(keys[:, 0]),
        )

    def _joined(self, name: str) -> np.ndarray:
        parts = self._parts.pop(name)
        if parts:
            return parts[0] if len(parts) == 1 else np.concatenate(parts)
        dtype, width = COLUMNS.get(name, (OFFSET, 1))
        return np.empty((0, width) if width > 1 else 0, dtype=dtype)


def num_offsets(specs: np.ndarray, spec_list: Sequence[Spec]) -> np.ndarray:
    """How many offsets each entry has: int64 [n]."""
    return np.array([len(spec.sizes) for spec in spec_list], dtype=np.int64)[specs]


def ascends(keys: np.ndarray) -> bool:
    """Whether each key is larger than the one before it."""
    larger, equal = np.zeros(max(len(keys) - 1, 0), bool), np.ones(max(len(keys) - 1, 0), bool)
    for word in range(KEY_WORDS):
        left, right = keys[:-1, word], keys[1:, word]
        larger |= equal & (left < right)
        equal &= left == right
    return bool(larger.all())


def _sorted(keys: np.ndarray) -> np.ndarray:
    """The order in which keys ascend, without all but the last of equal ones."""
    order = keys[:, 0].argsort(kind="stable")
    first = keys[order, 0]
    if (first[:-1] == first[1:]).any():
        order = np.lexsort([keys[:, word] for word in reversed(range(KEY_WORDS))])
        last = np.ones(len(order), bool)
        last[:-1] = (keys[order[:-1]] != keys[order[1:]]).any(axis=1)
        order = order[last]
    return order
