"""Where each entry lies, in memory: arrays of the rows of packs, and their order by key. 61 bytes an entry."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice

import numpy as np

from latentcache.identity import key_names
from latentcache.store.entry import check_key
from latentcache.store.layout import DIGEST_BYTES, KEY_BYTES, Location, Pack, PackRow, RowGroup

_KEY_WORDS = 4
_CHUNK_PACKS = 256  # brought together at once: small arrays for each pack would leave holes all over the heap
_CHUNK = 1 << 14  # keys looked up at once
_MIN_MERGE = 4  # a part of the table is merged with a later one that is not this many times smaller


def key_words(keys: Sequence[str]) -> np.ndarray:
    """Keys as words [n, 4] that sort as they do. StoreError for one that is no key."""
    # One conversion for all: each on its own takes ten times as long.
    try:
        text = "".join(keys)
        data = bytes.fromhex(text)
        # fromhex is more liberal than a key is.
        good = data.hex() == text and set(map(len, keys)) <= {2 * KEY_BYTES}
    except (ValueError, TypeError):
        good = False
    if not good:
        for key in keys:
            check_key(key)
    return _words(np.frombuffer(data, np.uint8))


def _words(keys: np.ndarray) -> np.ndarray:
    return keys.view(">u8").astype(np.uint64).reshape(-1, _KEY_WORDS)


_Columns = tuple[np.ndarray, np.ndarray, np.ndarray]
"""The columns of some packs' rows: keys as words [n, 4], digests [n, 16], and which are live [n]."""


def _joined(columns: Iterable[_Columns]) -> _Columns:
    keys, digests, live = zip(*columns, strict=True)
    return np.concatenate(keys), np.concatenate(digests), np.concatenate(live)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The rows of some packs, one pack after the other: that of number i (`numbers`, by id) begins at `starts[i]`.

    `order` has the rows that were live when the part was made, by key, and `first_words` the first word of each of
    these, to search in: 64 bits of a digest, which no two keys of a part share. `live` is changed.
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
        """Sort the rows that are live."""
        keys, digests, live = columns
        starts = np.fromiter(accumulate([pack.num_entries for pack in packs], initial=0), np.int64, len(packs) + 1)
        order = np.flatnonzero(live)
        first_words = keys[order, 0]
        by_key = first_words.argsort()
        numbers = {pack.id: number for number, pack in enumerate(packs)}
        return cls(packs, numbers, starts, keys, digests, live, order[by_key].astype(np.int32), first_words[by_key])

    def compacted(self) -> tuple[list[Pack], _Columns]:
        """The packs in which something is live, and their columns."""
        kept = np.logical_or.reduceat(self.live, self.starts[:-1])
        rows = np.repeat(kept, np.diff(self.starts))
        packs = [pack for pack, is_kept in zip(self.packs, kept.tolist(), strict=True) if is_kept]
        return packs, (self.keys[rows], self.digests[rows], self.live[rows])

    def positions(self, words: np.ndarray) -> np.ndarray:
        """Where the keys are: integers [n], and -1 for a key that is not here, or is not live."""
        at = self.first_words.searchsorted(words[:, 0])
        positions = self.order.take(at, mode="clip")
        found = self.keys.take(positions, axis=0)
        live = self.live.take(positions)
        if found.tobytes() == words.tobytes() and live.all():
            return positions
        here = live & (found == words).all(axis=1)
        return np.where(here, positions, np.int64(-1))

    def locations(self, positions: np.ndarray) -> list[Location]:
        """The locations of these rows."""
        numbers = self.starts.searchsorted(positions, "right") - 1
        rows = (positions - self.starts.take(numbers)).tolist()
        digests = self.digests.take(positions, axis=0).view(f"V{DIGEST_BYTES}").ravel().tolist()
        packs = [self.packs[number] for number in numbers.tolist()]
        return [
            Location(pack, row, digest, pack.groups[bisect_right(pack.ends, row)])
            for pack, row, digest in zip(packs, rows, digests, strict=True)
        ]

    def names(self, positions: np.ndarray) -> list[str]:
        """The keys of these rows."""
        return key_names(self.keys[positions].astype(">u8"))


class LocationTable:
    """A map of keys to locations. One thread at a time may change it; others may read at the same time.

    It is a tuple of parts: a large one, and smaller ones of the packs that came later. A key is live in one part at
    most. It also knows why entries are damaged, by pack.
    """

    def __init__(self, rows: Iterable[PackRow] = ()):
        self.packs: dict[str, Pack] = {}
        self._parts: tuple[_Part, ...] = ()
        self._reasons: dict[str, dict[str, str]] = {}
        self.add(rows)

    def add(self, rows: Iterable[PackRow]) -> None:
        """Add packs, or put new rows in the place of old ones, with the entries that are live in them."""
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
                chunks.append((_words(keys.reshape(-1)), digests, flags))
        if packs:
            self._parts = _merged([*self._parts, _Part.of(packs, _joined(chunks))])

    def __len__(self) -> int:
        return sum(int(np.count_nonzero(part.live)) for part in self._parts)

    @staticmethod
    def _search(parts: Sequence[_Part], keys: Sequence[str]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """By part: its number, which of the keys it has, and where. StoreError for one that is no key.

        The parts are given, since another thread may put others in their place.
        """
        for start in range(0, len(keys), _CHUNK):
            words = key_words(keys[start : start + _CHUNK])
            for number, part in enumerate(parts):
                positions = part.positions(words)
                [here] = (positions >= 0).nonzero()
                yield number, start + here, positions[here]

    def look_up(self, keys: Sequence[str]) -> list[Location | None]:
        """Where the keys are, None for one that is not here. StoreError for one that is no key."""
        found: list[Location | None] = [None] * len(keys)
        parts = self._parts
        for number, here, positions in self._search(parts, keys):
            for at, location in zip(here.tolist(), parts[number].locations(positions), strict=True):
                found[at] = location
        return found

    def places(self, keys: Sequence[str]) -> tuple[list[str], np.ndarray]:
        """Say where entries lie: see `Store.places`."""
        parts = self._parts
        before = list(accumulate([len(part.packs) for part in parts], initial=0))
        found = np.full((len(keys), 2), -1, np.int64)
        for number, here, positions in self._search(parts, keys):
            packs = parts[number].starts.searchsorted(positions, "right") - 1
            found[here, 0] = before[number] + packs
            found[here, 1] = positions - parts[number].starts[packs]
        return [pack.id for part in parts for pack in part.packs], found

    def find(self, keys: Sequence[str]) -> set[str]:
        """Find which of the keys are here."""
        return {keys[at] for _, here, _ in self._search(self._parts, keys) for at in here.tolist()}

    def drop(self, keys: Sequence[str]) -> None:
        """Forget entries."""
        parts = self._parts
        for number, _, positions in self._search(parts, keys):
            parts[number].live[positions] = False

    def drop_packs(self, packs: Collection[str]) -> None:
        """Forget packs, and what lies in them."""
        for pack in packs:
            for part, rows in self._rows_of(pack):
                part.live[rows] = False
            self.packs.pop(pack, None)
            self._reasons.pop(pack, None)

    def damaged(self) -> dict[str, str]:
        """Why each entry that is not here is damaged, by key."""
        # Of lists: another thread may change the dicts.
        known = dict(chain.from_iterable([list(reasons.items()) for reasons in list(self._reasons.values())]))
        live = self.find(list(known))
        return {key: reason for key, reason in known.items() if key not in live}

    def packs_with_reasons(self, keys: Collection[str]) -> set[str]:
        """The packs that say why one of these entries is damaged."""
        return {pack for pack, reasons in self._reasons.items() if not reasons.keys().isdisjoint(keys)}

    def mark(self, key: str, reason: str) -> None:
        """Make an entry a damaged one, here alone."""
        self.drop([key])
        self._reasons.setdefault("", {})[key] = reason

    def keys(self) -> list[str]:
        """All keys, oldest pack first."""
        return [key for part in self._parts for key in part.names(np.flatnonzero(part.live))]

    def empty_packs(self) -> set[str]:
        """The packs in which no entry is live."""
        return self.packs.keys() - self.live_sizes().keys()

    def entries_in(self, pack: str) -> dict[str, Location]:
        """The entries that lie in a pack, by key."""
        for part, rows in self._rows_of(pack):
            if part.live[rows].any():
                positions = rows.start + np.flatnonzero(part.live[rows])
                return dict(zip(part.names(positions), part.locations(positions), strict=True))
        return {}

    def _rows_of(self, pack: str) -> Iterator[tuple[_Part, slice]]:
        """Where a pack's rows are. Of several parts one has those that count."""
        for part in self._parts:
            if (number := part.numbers.get(pack)) is not None:
                yield part, slice(int(part.starts[number]), int(part.starts[number + 1]))

    def live_sizes(self) -> dict[str, tuple[int, int]]:
        """By pack that has live entries: how many, and the bytes of their values (`RowGroup.mean_bytes` each)."""
        return _summed((pack.id, num, group) for pack, num, group in self._live_groups())

    def counts(self) -> dict[str, tuple[int, int]]:
        """By kind: how many entries there are, and the bytes of their values (`RowGroup.mean_bytes` each)."""
        return _summed((group.kind, num, group) for _, num, group in self._live_groups())

    def _live_groups(self) -> Iterator[tuple[Pack, int, RowGroup]]:
        for part in self._parts:
            for pack, start in zip(part.packs, part.starts.tolist(), strict=False):
                for group in pack.groups:
                    first = start + group.first
                    if num := int(np.count_nonzero(part.live[first : first + group.num])):
                        yield pack, num, group


def _summed(groups: Iterable[tuple[str, int, RowGroup]]) -> dict[str, tuple[int, int]]:
    sums: dict[str, tuple[int, int]] = {}
    for name, num, group in groups:
        num_before, bytes_before = sums.get(name, (0, 0))
        sums[name] = num_before + num, bytes_before + num * group.payload_bytes // group.num
    return sums


def _merged(parts: list[_Part]) -> tuple[_Part, ...]:
    """The parts, with small ones joined: each is several times larger than the next, so there are few."""
    while len(parts) > 1 and len(parts[-2].order) < _MIN_MERGE * len(parts[-1].order):
        (packs, columns), (more_packs, more_columns) = parts[-2].compacted(), parts[-1].compacted()
        parts[-2:] = [_Part.of(packs + more_packs, _joined([columns, more_columns]))]
    return tuple(parts)
