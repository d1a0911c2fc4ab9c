"""The location of each entry, in memory: arrays of all packs' rows, sorted by key. 61 bytes per entry."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice

import numpy as np

from latentcache.identity import key_names
from latentcache.store.entry import check_key
from latentcache.store.layout import DIGEST_BYTES, KEY_BYTES, Location, Pack, PackRow, RowGroup

_KEY_WORDS = 4
_Keys = Sequence[str] | np.ndarray  # as text, or as digests: uint8 [n, 32]
_CHUNK_PACKS = 256  # joined at once: small arrays per pack would fragment the heap
_CHUNK = 1 << 14  # keys looked up at once
_MIN_MERGE = 4  # a part of the table is merged with the next one unless it is this many times larger


def key_words(keys: Sequence[str]) -> np.ndarray:
    """Keys as words [n, 4] with the same sort order. StoreError for an invalid key."""
    # One conversion for all keys is ten times faster than one per key.
    try:
        text = "".join(keys)
        data = bytes.fromhex(text)
        # fromhex accepts more than valid keys.
        good = data.hex() == text and set(map(len, keys)) <= {2 * KEY_BYTES}
    except (ValueError, TypeError):
        good = False
    if not good:
        for key in keys:
            check_key(key)
    return _words(np.frombuffer(data, np.uint8))


def _words(keys: np.ndarray) -> np.ndarray:
    """Keys, uint8 [n, 32] or flat, as words [n, 4]."""
    return np.ascontiguousarray(keys).view(">u8").astype(np.uint64).reshape(-1, _KEY_WORDS)


_Columns = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Columns of packs' rows: keys as words [n, 4], digests [n, 16], and live flags [n]."""


def _joined(columns: Iterable[_Columns]) -> _Columns:
    keys, digests, live = zip(*columns, strict=True)
    return np.concatenate(keys), np.concatenate(digests), np.concatenate(live)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The rows of some packs, pack by pack: pack i (`numbers` maps ids to i) starts at row `starts[i]`.

    `order` lists the rows that were live when the part was made, sorted by key, and `first_words` the first word of
    each of their keys, for binary search: no two keys of a part share these 64 bits. Only `live` is mutable.
    """

    packs: list[Pack]
    numbers: dict[str, int]
    starts: np.ndarray
    keys: np.ndarray
    digests: np.ndarray
    live: np.ndarray
    order: np.ndarray
    first_words: np.ndarray

    @classmethod
    def of(cls, packs: list[Pack], columns: _Columns) -> _Part:
        """Make a part of these packs, with its live rows sorted by key."""
        keys, digests, live = columns
        starts = np.fromiter(accumulate([pack.num_entries for pack in packs], initial=0), np.int64, len(packs) + 1)
        order = np.flatnonzero(live)
        first_words = keys[order, 0]
        by_key = first_words.argsort()
        numbers = {pack.id: number for number, pack in enumerate(packs)}
        return cls(packs, numbers, starts, keys, digests, live, order[by_key].astype(np.int32), first_words[by_key])

    def compacted(self) -> tuple[list[Pack], _Columns]:
        """The packs with live rows, and their columns."""
        kept = np.logical_or.reduceat(self.live, self.starts[:-1])
        rows = np.repeat(kept, np.diff(self.starts))
        packs = [pack for pack, is_kept in zip(self.packs, kept.tolist(), strict=True) if is_kept]
        return packs, (self.keys[rows], self.digests[rows], self.live[rows])

    def positions(self, words: np.ndarray) -> np.ndarray:
        """The row of each key: integers [n], -1 for a key that is missing or not live."""
        at = self.first_words.searchsorted(words[:, 0])
        positions = self.order.take(at, mode="clip")
        found = self.keys.take(positions, axis=0)
        live = self.live.take(positions)
        if found.tobytes() == words.tobytes() and live.all():
            return positions
        here = live & (found == words).all(axis=1)
        return np.where(here, positions, np.int64(-1))

    def locations(self, positions: np.ndarray) -> list[Location]:
        """The locations of these rows of the part."""
        numbers = self.starts.searchsorted(positions, "right") - 1
        rows = (positions - self.starts.take(numbers)).tolist()
        digests = self.digests.take(positions, axis=0).view(f"V{DIGEST_BYTES}").ravel().tolist()
        packs = [self.packs[number] for number in numbers.tolist()]
        return [
            Location(pack, row, digest, pack.groups[bisect_right(pack.ends, row)])
            for pack, row, digest in zip(packs, rows, digests, strict=True)
        ]

    def names(self, positions: np.ndarray) -> list[str]:
        """The keys of these rows of the part."""
        return key_names(self.keys[positions].astype(">u8"))


class LocationTable:
    """A map from keys to locations. One thread at a time may change it, while other threads read it.

    It is a tuple of parts: a large one, and smaller ones for packs that were added later. A key is live in at most one
    part. It also holds the reasons of damaged entries, by pack.
    """

    def __init__(self, rows: Iterable[PackRow] = ()):
        self.packs: dict[str, Pack] = {}
        self._parts: tuple[_Part, ...] = ()
        self._reasons: dict[str, dict[str, str]] = {}
        self.add(rows)

    def add(self, rows: Iterable[PackRow]) -> None:
        """Add packs with their live entries, replacing the rows of packs that are already here."""
        packs: list[Pack] = []
        chunks: list[_Columns] = []
        rest = iter(rows)
        while chunk := list(islice(rest, _CHUNK_PACKS)):
            self.drop_packs([row.pack.id for row in chunk])
            for row in chunk:
                if row.reasons:
                    self._reasons[row.pack.id] = row.damaged()
                self.packs[row.pack.id] = row.pack
            live = [row for row in chunk if row.live.any()]
            if live:
                packs += [row.pack for row in live]
                keys, digests, flags = _joined([(row.keys, row.digests, row.live) for row in live])
                chunks.append((_words(keys), digests, flags))
        if packs:
            self._parts = _merged([*self._parts, _Part.of(packs, _joined(chunks))])

    def __len__(self) -> int:
        return sum(int(np.count_nonzero(part.live)) for part in self._parts)

    @staticmethod
    def _search(parts: Sequence[_Part], keys: _Keys) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield for each part its number, the indices of its keys, and their rows. StoreError for an invalid key.

        The caller passes the parts, since another thread may replace them.
        """
        for start in range(0, len(keys), _CHUNK):
            chunk = keys[start : start + _CHUNK]
            words = _words(chunk) if isinstance(chunk, np.ndarray) else key_words(chunk)
            for number, part in enumerate(parts):
                positions = part.positions(words)
                [here] = (positions >= 0).nonzero()
                yield number, start + here, positions[here]

    def look_up(self, keys: Sequence[str]) -> list[Location | None]:
        """The location of each key, None if it is missing. StoreError for an invalid key."""
        found: list[Location | None] = [None] * len(keys)
        parts = self._parts
        for number, here, positions in self._search(parts, keys):
            for at, location in zip(here.tolist(), parts[number].locations(positions), strict=True):
                found[at] = location
        return found

    def places(self, keys: np.ndarray) -> tuple[list[str], np.ndarray]:
        """The pack and row of each entry: see `Store.places`."""
        parts = self._parts
        before = list(accumulate([len(part.packs) for part in parts], initial=0))
        found = np.full((len(keys), 2), -1, np.int64)
        for number, here, positions in self._search(parts, keys):
            packs = parts[number].starts.searchsorted(positions, "right") - 1
            found[here, 0] = before[number] + packs
            found[here, 1] = positions - parts[number].starts[packs]
        return [pack.id for part in parts for pack in part.packs], found

    def find(self, keys: Sequence[str]) -> set[str]:
        """The keys that have entries. StoreError for an invalid key."""
        return {keys[at] for _, here, _ in self._search(self._parts, keys) for at in here.tolist()}

    def drop(self, keys: _Keys) -> None:
        """Drop entries."""
        parts = self._parts
        for number, _, positions in self._search(parts, keys):
            parts[number].live[positions] = False

    def without(self, keys: np.ndarray) -> LocationTable:
        """A copy of the table that lacks these entries: uint8 [n, 32]."""
        rest = LocationTable()
        rest.packs = dict(self.packs)
        rest._parts = tuple([replace(part, live=part.live.copy()) for part in self._parts])
        rest.drop(keys)
        return rest

    def drop_packs(self, packs: Collection[str]) -> None:
        """Drop packs and their entries."""
        for pack in packs:
            for part, rows in self._rows_of(pack):
                part.live[rows] = False
            self.packs.pop(pack, None)
            self._reasons.pop(pack, None)

    def damaged(self) -> dict[str, str]:
        """The reason for each damaged entry, by key, unless an intact copy is live."""
        # Copied to lists first: another thread may change the dicts.
        known = dict(chain.from_iterable([list(reasons.items()) for reasons in list(self._reasons.values())]))
        live = self.find(list(known))
        return {key: reason for key, reason in known.items() if key not in live}

    def packs_with_reasons(self, keys: Collection[str]) -> set[str]:
        """The packs that hold a damage reason for one of these entries."""
        return {pack for pack, reasons in self._reasons.items() if not reasons.keys().isdisjoint(keys)}

    def mark(self, key: str, reason: str) -> None:
        """Mark an entry as damaged in this table only."""
        self.drop([key])
        self._reasons.setdefault("", {})[key] = reason

    def keys(self) -> Iterator[str]:
        """All keys that are live at this call, oldest pack first."""
        live = [(part, np.flatnonzero(part.live)) for part in self._parts]
        chunks = ((part, rows[at : at + _CHUNK]) for part, rows in live for at in range(0, len(rows), _CHUNK))
        return chain.from_iterable(part.names(rows) for part, rows in chunks)

    def empty_packs(self) -> set[str]:
        """The packs without live entries."""
        return self.packs.keys() - self.live_sizes().keys()

    def entries_in(self, pack: str) -> dict[str, Location]:
        """The locations of a pack's live entries, by key."""
        for part, rows in self._rows_of(pack):
            if part.live[rows].any():
                positions = rows.start + np.flatnonzero(part.live[rows])
                return dict(zip(part.names(positions), part.locations(positions), strict=True))
        return {}

    def _rows_of(self, pack: str) -> Iterator[tuple[_Part, slice]]:
        """Yield the parts that have a pack's rows, and their range. At most one of them has live rows."""
        for part in self._parts:
            if (number := part.numbers.get(pack)) is not None:
                yield part, slice(int(part.starts[number]), int(part.starts[number + 1]))

    def live_sizes(self) -> dict[str, tuple[int, int]]:
        """The number and the bytes of live entries in each pack that has any."""
        sizes: dict[str, tuple[int, int]] = {}
        for pack, num, group in self.live_groups():
            num_before, bytes_before = sizes.get(pack.id, (0, 0))
            sizes[pack.id] = num_before + num, bytes_before + group.bytes_of(num)
        return sizes

    def live_groups(self) -> Iterator[tuple[Pack, int, RowGroup]]:
        """Yield each group that has live entries, with its pack and their number."""
        for part in self._parts:
            for pack, start in zip(part.packs, part.starts.tolist(), strict=False):
                for group in pack.groups:
                    first = start + group.first
                    if num := int(np.count_nonzero(part.live[first : first + group.num])):
                        yield pack, num, group


def _merged(parts: list[_Part]) -> tuple[_Part, ...]:
    """Merge small parts, so that each part is several times larger than the next and there are few of them."""
    while len(parts) > 1 and len(parts[-2].order) < _MIN_MERGE * len(parts[-1].order):
        (packs, columns), (more_packs, more_columns) = parts[-2].compacted(), parts[-1].compacted()
        parts[-2:] = [_Part.of(packs + more_packs, _joined([columns, more_columns]))]
    return tuple(parts)
