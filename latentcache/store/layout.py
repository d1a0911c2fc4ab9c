"""Where the bytes of entries lie in a pack: groups of entries with equal fields, and a column for each field.

Entries of one kind with equal fields, dtypes and shapes are a group. A row of a pack is one entry, and the rows of a
group follow each other, so where a row's bytes start is arithmetic. A field of natural length, as the text of newer
model families, is ragged: its values lie one after the other, and a column of offsets says where each row starts.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import xxhash

from latentcache.identity import key_names
from latentcache.store.entry import ARRAY_DTYPES, Description, description_of

KEY_BYTES, DIGEST_BYTES, OFFSET_BYTES = 32, 16, 8
_CRC_BYTES = 8


@dataclass(frozen=True)
class Column:
    """One field of a group: `num_rows` rows of `shape`, from byte `start` of the file.

    Of a ragged field `num_rows` counts the values of all entries, `shape` is that of one value, and
    `offsets_start` is where the int64 offsets [number of entries + 1] lie, in rows. Otherwise it is None.
    """

    field: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_rows: int
    offsets_start: int | None = None

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return ARRAY_DTYPES[self.dtype].itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class RowGroup:
    """Entries of one kind with equal fields: rows `first` ... `first + num - 1` of the pack. Columns are by field."""

    kind: str
    first: int
    num: int
    columns: tuple[Column, ...]

    @cached_property
    def ragged(self) -> frozenset[str]:
        """The fields that have a length of their own in each entry."""
        return frozenset([column.field for column in self.columns if column.offsets_start is not None])

    @cached_property
    def description(self) -> Description:
        """Each field's dtype name and shape. Equal ones are the same object. A ragged field's length is 0 here."""
        rows = [(c, c.shape if c.offsets_start is None else (0, *c.shape)) for c in self.columns]
        return description_of(*[(column.field, column.dtype, shape) for column, shape in rows])

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of the values of all entries."""
        return sum(column.num_rows * column.row_bytes for column in self.columns)

    @property
    def mean_bytes(self) -> int:
        """Bytes of the values of an entry; where a field is ragged, the mean over all entries."""
        return self.payload_bytes // self.num


@dataclass(frozen=True)
class Pack:
    """One pack's layout: its id, the bytes of its file, and its groups in the order of their rows."""

    id: str
    file_bytes: int
    groups: tuple[RowGroup, ...]

    @cached_property
    def num_entries(self) -> int:
        """How many rows there are, live or not."""
        return self.ends[-1]

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of the values of all entries that were written."""
        return sum(group.payload_bytes for group in self.groups)

    @cached_property
    def ends(self) -> list[int]:
        """The row after each group's last one: row r lies in the group of number `bisect_right(ends, r)`."""
        return [group.first + group.num for group in self.groups]

    def group_of(self, row: int) -> RowGroup:
        """The group in which a row lies."""
        return self.groups[bisect_right(self.ends, row)]

    def to_json(self) -> list[Any]:
        """The groups as JSON, which `_parsed_head` reads."""
        return [
            [g.kind, g.num, [[c.field, c.dtype, c.shape, c.start, c.num_rows, c.offsets_start] for c in g.columns]]
            for g in self.groups
        ]


class Location(msgspec.Struct, frozen=True, gc=False):  # made for each entry of a batch: faster than a tuple with names
    """Where one entry lies: a row of a pack. `digest` is its payload's digest (`entry.payload_digest`), 16 bytes."""

    pack: Pack
    row: int
    digest: bytes
    group: RowGroup

    @property
    def place(self) -> tuple[str, int]:
        """The pack's id and the row: two locations with one place are the same."""
        return self.pack.id, self.row


def byte_ranges(locations: Iterable[Location]) -> list[tuple[int, int]]:
    """The byte ranges of these entries' fields in their pack: (offset, length). A ragged field gives its offsets'."""
    ranges = []
    for location in locations:
        at = location.row - location.group.first
        for column in location.group.columns:
            if column.offsets_start is None:
                ranges.append((column.start + at * column.row_bytes, column.row_bytes))
            else:
                ranges.append((column.offsets_start + at * OFFSET_BYTES, 2 * OFFSET_BYTES))
    return ranges


@dataclass(slots=True, eq=False)
class PackRow:
    """One pack as the index knows it. `keys` [n, 32], `digests` [n, 16] (uint8), `live` [n] (bool), a row an entry.

    A row that is not live was removed, was found damaged, or lies in another pack. `reasons` says, by row, why an
    entry is damaged.
    """

    pack: Pack
    keys: np.ndarray
    digests: np.ndarray
    live: np.ndarray
    reasons: dict[int, str] = field(default_factory=dict)

    @classmethod
    def new(cls, pack: Pack, keys: np.ndarray, digests: np.ndarray) -> PackRow:
        """The row of a new pack: all of its entries are live."""
        return cls(pack, keys, digests, np.ones(len(keys), bool))

    def to_bytes(self) -> bytes:
        """The row's value in the index, with a checksum at its end. `from_bytes` is its inverse."""
        reasons: dict[str, list[int]] = {}  # one for all entries of a pack that is gone
        for row, reason in self.reasons.items():
            reasons.setdefault(reason, []).append(row)
        value = {"file_bytes": self.pack.file_bytes, "groups": self.pack.to_json(), "reasons": reasons}
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
            groups, file_bytes, by_reason = _parsed_head(body[4:at])
            layout = Pack(pack, file_bytes, groups)
            num = layout.num_entries
            reasons = {row: reason for reason, rows in by_reason.items() for row in rows}
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"not the row of a pack: {error!r:.100}") from error
        sizes = [num * KEY_BYTES, num * DIGEST_BYTES, (num + 7) // 8]
        if len(body) != at + sum(sizes):
            raise ValueError(f"not the row of a pack of {num:,} entries")
        keys = np.frombuffer(body, np.uint8, sizes[0], at).reshape(num, KEY_BYTES)
        digests = np.frombuffer(body, np.uint8, sizes[1], at + sizes[0]).reshape(num, DIGEST_BYTES)
        live = np.unpackbits(np.frombuffer(body, np.uint8, sizes[2], at + sizes[0] + sizes[1]), count=num).view(bool)
        return cls(layout, keys, digests, live, reasons)

    def key(self, row: int) -> str:
        """The key of a row."""
        return str(self.keys[row].tobytes().hex())

    def names(self) -> list[str]:
        """The keys as text, in the order of the rows."""
        return key_names(self.keys)

    def location(self, row: int) -> Location:
        """Where the entry of a row lies."""
        return Location(self.pack, row, self.digests[row].tobytes(), self.pack.group_of(row))

    def damaged(self) -> dict[str, str]:
        """Why each damaged entry is one, by key."""
        return dict(zip(key_names(self.keys[list(self.reasons)]), self.reasons.values(), strict=True))


def drop_copies(rows: Sequence[PackRow]) -> None:
    """Let a key that is live in several rows be live in the first of these alone."""
    if not rows:
        return
    live = np.flatnonzero(np.concatenate([row.live for row in rows]))
    keys = np.concatenate([row.keys for row in rows])[live]
    first = np.zeros(sum(len(row.keys) for row in rows), bool)
    first[live[np.unique(keys.view(f"S{KEY_BYTES}").ravel(), return_index=True)[1]]] = True
    for row, end in zip(rows, accumulate(len(row.keys) for row in rows), strict=True):
        row.live[:] = first[end - len(row.keys) : end]


@lru_cache(256)  # of damaged entries they are long
def _parsed_head(text: bytes) -> tuple[tuple[RowGroup, ...], int, dict[str, list[int]]]:
    """The groups, bytes of the file, and rows by reason that a row's head lists. Full packs often share one.

    Do not change what it returns.
    """
    value = json.loads(str(text, "ascii"))
    groups, first = list[RowGroup](), 0
    for kind, num, columns in value["groups"]:
        made = [Column(name, dtype, tuple(shape), *numbers) for name, dtype, shape, *numbers in columns]
        groups.append(RowGroup(kind, first, num, tuple(made)))
        first += num
    return tuple(groups), value["file_bytes"], dict(value["reasons"])
