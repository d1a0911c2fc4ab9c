"""Where each entry lies, in memory: arrays that are sorted by key, some 70 bytes an entry.

The index has one row a pack, a `PackRow`. A `LocationTable` is made of those rows.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from latentcache.store.base import check_key
from latentcache.store.layout import (
    DIGEST_BYTES,
    KEY_BYTES,
    Location,
    Pack,
    PackHead,
    key_names,
    locate,
    pack_from_json,
)

_KEY_WORDS = 4
_CRC_BYTES = 8
_CHUNK = 1 << 14  # keys looked up at once
_MIN_MERGE = 4  # a part of the table is merged with a later one that is not this many times smaller


@dataclass(slots=True, eq=False)
class PackRow:
    """One pack as the index knows it. `keys` [n, 32], `digests` [n, 16] (uint8), `live` [n] (bool), a row an entry.

    A row that is not live was removed, was found damaged, or lies in another pack. `reasons` says, by row, why an
    entry is damaged. `is_gone`: there is no such file any more, and the row is there for its reasons.
    """

    pack: Pack
    keys: np.ndarray
    digests: np.ndarray
    live: np.ndarray
    reasons: dict[int, str] = field(default_factory=dict)
    is_gone: bool = False

    @classmethod
    def of(cls, head: PackHead) -> PackRow:
        """The row of a new pack: all of its entries are live."""
        return cls(head.pack, head.keys, head.digests, np.ones(len(head.keys), bool))

    def to_bytes(self) -> bytes:
        """The row's value in the index, with a checksum at its end. `from_bytes` is its inverse."""
        value = {
            "file_bytes": self.pack.file_bytes,
            "groups": self.pack.to_json(),
            "is_gone": self.is_gone,
            "reasons": self._rows_by_reason(),
        }
        head = json.dumps(value, separators=(",", ":")).encode("ascii")
        arrays = (self.keys.tobytes(), self.digests.tobytes(), np.packbits(self.live).tobytes())
        data = b"".join((len(head).to_bytes(4, "little"), head, *arrays))
        return data + xxhash.xxh3_64(data).digest()

    @classmethod
    def from_bytes(cls, pack: str, data: bytes) -> PackRow:
        """The row that `to_bytes` wrote for this pack. ValueError for anything else."""
        body = data[:-_CRC_BYTES]
        if len(data) < 4 + _CRC_BYTES or xxhash.xxh3_64(body).digest() != data[-_CRC_BYTES:]:
            raise ValueError("its bytes do not have the checksum that was stored with them")
        at = 4 + int.from_bytes(body[:4], "little")
        try:
            value = json.loads(str(body[4:at], "ascii"))
            layout = pack_from_json(pack, value["file_bytes"], value["groups"])
            num, is_gone = layout.num_entries, bool(value["is_gone"])
            reasons = {row: reason for reason, rows in value["reasons"].items() for row in rows}
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not the row of a pack: {error!r:.100}") from error
        sizes = [num * KEY_BYTES, num * DIGEST_BYTES, (num + 7) // 8]
        if len(body) != at + sum(sizes) or not all(type(row) is int and 0 <= row < num for row in reasons):
            raise ValueError(f"not the row of a pack of {num:,} entries")
        keys = np.frombuffer(body, np.uint8, sizes[0], at).reshape(num, KEY_BYTES)
        digests = np.frombuffer(body, np.uint8, sizes[1], at + sizes[0]).reshape(num, DIGEST_BYTES)
        live = np.unpackbits(np.frombuffer(body, np.uint8, sizes[2], at + sizes[0] + sizes[1]), count=num).view(bool)
        return cls(layout, keys, digests, live, reasons, is_gone)

    def _rows_by_reason(self) -> dict[str, list[int]]:
        rows: dict[str, list[int]] = {}
        for row, reason in self.reasons.items():
            rows.setdefault(reason, []).append(row)
        return rows

    def key(self, row: int) -> str:
        """The key of a row."""
        return str(self.keys[row].tobytes().hex())

    def names(self) -> list[str]:
        """The keys as text, in the order of the rows."""
        return key_names(self.keys)

    def row_of(self, key: str) -> int | None:
        """The row of a key, or None."""
        found = np.flatnonzero((self.keys == np.frombuffer(bytes.fromhex(key), np.uint8)).all(axis=1))
        return int(found[0]) if len(found) else None

    def damaged(self) -> dict[str, str]:
        """Why each damaged entry is one, by key."""
        return {self.key(row): reason for row, reason in self.reasons.items()}


def key_words(keys: Sequence[str]) -> np.ndarray:
    """Keys as words [n * 4] that sort as they do. StoreError for one that is no key."""
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
    return np.frombuffer(data, ">u8").astype(np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Entries that were live when it was made, sorted by key. `packs` numbers them in the table. `live` is changed.

    `first_words` are `keys[:, 0]`, to search in.
    """

    keys: np.ndarray
    first_words: np.ndarray
    digests: np.ndarray
    packs: np.ndarray
    rows: np.ndarray
    live: np.ndarray

    @classmethod
    def of(cls, keys: np.ndarray, digests: np.ndarray, packs: np.ndarray, rows: np.ndarray) -> _Part:
        """Sort entries. Of two with one key the later counts."""
        first = np.ascontiguousarray(keys[:, 0])
        order = first.argsort()
        first = first.take(order)
        if (first[:-1] == first[1:]).any():
            order = np.lexsort([keys[:, word] for word in reversed(range(_KEY_WORDS))])
            last = np.ones(len(order), bool)
            last[:-1] = (keys[order[:-1]] != keys[order[1:]]).any(axis=1)
            order = order[last]
            first = keys[order, 0]
        keys, digests = keys.take(order, axis=0), digests.take(order, axis=0)
        return cls(keys, first, digests, packs.take(order), rows.take(order), np.ones(len(order), bool))

    def __len__(self) -> int:
        return len(self.first_words)

    def positions(self, words: np.ndarray) -> np.ndarray:
        """Where the keys are: int64 [n], and -1 for a key that is not here, or is not live."""
        if not len(self):
            return np.full(len(words) // _KEY_WORDS, -1, dtype=np.int64)
        at = self.first_words.searchsorted(words[::_KEY_WORDS])
        found = self.keys.take(at, axis=0, mode="clip")
        if found.tobytes() != words.tobytes():
            keys = words.reshape(-1, _KEY_WORDS)
            is_key, shares_word = (found == keys).all(axis=1), found[:, 0] == keys[:, 0]
            at = np.where(is_key, at, -1)
            for number in np.flatnonzero(shares_word & ~is_key).tolist():
                at[number] = self._position(keys[number])
        return np.where(self.live.take(at, mode="clip"), at, -1)

    def _position(self, key: np.ndarray) -> int:
        """As `positions`, also where many keys have the same first word."""
        at, end = (int(self.first_words.searchsorted(key[0], side)) for side in ("left", "right"))
        while at < end:
            if (self.keys[at] == key).all():
                return at
            at += 1
        return -1


def _columns(num: int, before: Sequence[np.ndarray] = ()) -> list[np.ndarray]:
    """Columns for so many entries: keys as words, digests, numbers of packs, rows. They begin with those of before."""
    columns: list[np.ndarray] = [
        np.empty((num, _KEY_WORDS), np.uint64),
        np.empty((num, DIGEST_BYTES), np.uint8),
        np.empty(num, np.uint32),
        np.empty(num, np.uint32),
    ]
    for column, old in zip(columns, before, strict=False):
        column[: len(old)] = old
    return columns


class LocationTable:
    """A map of keys to locations. One thread at a time may change it; others may read at the same time.

    It is a tuple of sorted parts: a large one, and smaller ones of the packs that came later. A key is live in one
    part at most. It also knows why entries are damaged, by pack.
    """

    def __init__(self, rows: Iterable[PackRow] = ()):
        self.packs: dict[str, Pack] = {}
        self._pack_list: list[Pack] = []
        self._parts: tuple[_Part, ...] = ()
        self._reasons: dict[str, dict[str, str]] = {}
        self.add(rows)

    def add(self, rows: Iterable[PackRow]) -> None:
        """Add packs, or put new rows in the place of old ones, with the entries that are live in them."""
        columns: list[np.ndarray] = []
        end = 0
        for row in rows:
            self.drop_packs([row.pack.id])
            if row.reasons:
                self._reasons[row.pack.id] = row.damaged()
            if row.is_gone:
                continue
            self.packs[row.pack.id] = row.pack
            self._pack_list.append(row.pack)
            live = np.flatnonzero(row.live)
            start, end = end, end + len(live)
            if not columns or end > len(columns[0]):
                # Large arrays that double: small ones for each pack would leave holes all over the heap.
                columns = _columns(max(1024, 2 * end), columns)
            values = (row.keys.view(">u8")[live], row.digests[live], len(self._pack_list) - 1, live)
            for column, value in zip(columns, values, strict=True):
                column[start:end] = value
        if end:
            self._parts = _merged([*self._parts, _Part.of(*[column[:end] for column in columns])])

    def __len__(self) -> int:
        return sum(int(np.count_nonzero(part.live)) for part in self._parts)

    def look_up(self, keys: Sequence[str]) -> list[Location | None]:
        """Where the keys are, None for one that is not here. StoreError for one that is no key."""
        words = key_words(keys)
        found: list[Location | None] = [None] * len(keys)
        for part in self._parts:
            positions = part.positions(words)
            here = np.flatnonzero(positions >= 0)
            at = positions[here]
            packs, rows = part.packs[at].tolist(), part.rows[at].tolist()
            digests = part.digests[at].tobytes()
            for order, number in enumerate(here.tolist()):
                pack, row = self._pack_list[packs[order]], rows[order]
                digest = digests[order * DIGEST_BYTES : (order + 1) * DIGEST_BYTES]
                found[number] = Location(pack, row, digest, pack.groups[bisect_right(pack.ends, row)])
        return found

    def find(self, keys: Sequence[str]) -> set[str]:
        """Those of the keys that are here."""
        found: set[str] = set()
        for start in range(0, len(keys), _CHUNK):
            chunk = keys[start : start + _CHUNK]
            words = key_words(chunk)
            here = np.zeros(len(chunk), bool)
            for part in self._parts:
                here |= part.positions(words) >= 0
            found.update(chunk if here.all() else [chunk[number] for number in np.flatnonzero(here).tolist()])
        return found

    def drop(self, keys: Sequence[str]) -> int:
        """Forget entries. Returns how many of them were here."""
        num_dropped = 0
        for start in range(0, len(keys), _CHUNK):
            words = key_words(keys[start : start + _CHUNK])
            for part in self._parts:
                positions = part.positions(words)
                positions = np.unique(positions[positions >= 0])
                part.live[positions] = False
                num_dropped += len(positions)
        return num_dropped

    def drop_packs(self, packs: Collection[str]) -> None:
        """Forget packs, and what lies in them."""
        known = self.packs.keys() & packs
        if known:
            numbers = [number for number, pack in enumerate(self._pack_list) if pack.id in known]
            for part in self._parts:
                part.live[np.isin(part.packs, numbers)] = False
        for pack in packs:
            self.packs.pop(pack, None)
            self._reasons.pop(pack, None)

    def reason(self, key: str) -> str | None:
        """Why an entry that is not here is damaged, or None."""
        found = [reasons[key] for reasons in self._reasons.values() if key in reasons]
        return found[-1] if found else None

    def damaged(self) -> dict[str, str]:
        """Why each entry that is not here is damaged, by key."""
        known = {key: reason for reasons in self._reasons.values() for key, reason in reasons.items()}
        live = self.find(list(known))
        return {key: reason for key, reason in known.items() if key not in live}

    def packs_with_reasons(self, keys: Collection[str]) -> set[str]:
        """The packs that say why one of these entries is damaged."""
        return {pack for pack, reasons in self._reasons.items() if not reasons.keys().isdisjoint(keys)}

    def mark(self, key: str, reason: str) -> None:
        """Make an entry a damaged one, here alone."""
        self.drop([key])
        self._reasons.setdefault("", {})[key] = reason

    def _ordered(self) -> Iterator[tuple[_Part, np.ndarray]]:
        """Each part, and the positions that are live in it, in the order of packs and their rows."""
        for part in self._parts:
            positions = np.flatnonzero(part.live)
            yield part, positions[np.lexsort([part.rows[positions], part.packs[positions]])]

    def keys(self) -> list[str]:
        """All keys, oldest pack first."""
        return [key for part, positions in self._ordered() for key in _names(part, positions)]

    def by_pack(self) -> dict[str, dict[str, Location]]:
        """The entries of each pack that has some, oldest first."""
        packs: dict[str, dict[str, Location]] = {}
        for part, positions in self._ordered():
            for key, at in zip(_names(part, positions), positions.tolist(), strict=True):
                pack, row = self._pack_list[part.packs[at]], int(part.rows[at])
                packs.setdefault(pack.id, {})[key] = locate(pack, row, part.digests[at].tobytes())
        return packs

    def counts(self) -> Mapping[str, tuple[int, int]]:
        """By kind: how many entries there are, and the bytes of their values."""
        counts: dict[str, tuple[int, int]] = {}
        for part in self._parts:
            packs, rows = part.packs[part.live], part.rows[part.live]
            order = packs.argsort(kind="stable")
            ends = packs[order].searchsorted(np.arange(len(self._pack_list) + 1))
            for number in np.unique(packs).tolist():
                own = rows[order[ends[number] : ends[number + 1]]]
                for group in self._pack_list[number].groups:
                    num = int(np.count_nonzero((own >= group.first) & (own < group.first + group.num)))
                    before = counts.get(group.kind, (0, 0))
                    counts[group.kind] = (before[0] + num, before[1] + num * group.payload_bytes // group.num)
        return {kind: count for kind, count in counts.items() if count[0]}


def _names(part: _Part, positions: np.ndarray) -> Iterator[str]:
    for start in range(0, len(positions), 1 << 16):
        yield from key_names(part.keys[positions[start : start + (1 << 16)]].astype(">u8"))


def _merged(parts: list[_Part]) -> tuple[_Part, ...]:
    """The parts, with small ones joined: each is several times larger than the next, so there are few."""
    while len(parts) > 1 and len(parts[-2]) < _MIN_MERGE * len(parts[-1]):
        right, left = parts.pop(), parts.pop()
        columns = [
            np.concatenate([getattr(part, name)[part.live] for part in (left, right)])
            for name in ("keys", "digests", "packs", "rows")
        ]
        parts.append(_Part.of(*columns))
    return tuple(parts)
