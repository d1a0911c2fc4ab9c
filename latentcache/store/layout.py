"""The layout of entries in a pack: groups of entries with equal fields, and a column for each field.

Entries of one kind with equal fields, dtypes and shapes form a group. Each entry is one row of the pack, and the rows
of a group are contiguous, so a row's byte offset is plain arithmetic. A field of natural length, such as the text
embeddings of newer model families, is ragged: its values are contiguous, and a column of offsets marks the rows.
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

from latentcache.identity import key_names, sortable
from latentcache.store.entry import ARRAY_DTYPES, Description, description_of

KEY_BYTES, DIGEST_BYTES, OFFSET_BYTES = 32, 16, 8
_CRC_BYTES = 8


@dataclass(frozen=True)
class Column:
    """One field of a group: `num_rows` rows of `shape`, from byte `start` of the file.

    For a ragged field, `num_rows` counts the values of all entries, `shape` is the shape of one value, and
    `offsets_start` is the byte at which its int64 offsets [number of entries + 1] start. Otherwise it is None.
    """

    field: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_rows: int
    offsets_start: int | None = None

    @cached_property
    def row_bytes(self) -> int:
        """Size of one row in bytes."""
        return ARRAY_DTYPES[self.dtype].itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class RowGroup:
    """Entries of one kind with equal fields: rows `first` to `first + num - 1` of the pack. One column per field."""

    kind: str
    first: int
    num: int
    columns: tuple[Column, ...]

    @cached_property
    def ragged(self) -> frozenset[str]:
        """The fields whose length differs between entries."""
        return frozenset([column.field for column in self.columns if column.offsets_start is not None])

    @cached_property
    def description(self) -> Description:
        """Each field's dtype name and shape, shared by equal groups. A ragged field has length 0 here."""
        rows = [(c, c.shape if c.offsets_start is None else (0, *c.shape)) for c in self.columns]
        return description_of(*[(column.field, column.dtype, shape) for column, shape in rows])

    @cached_property
    def payload_bytes(self) -> int:
        """Size of the values of all entries in bytes."""
        return sum(column.num_rows * column.row_bytes for column in self.columns)

    def bytes_of(self, num: int) -> int:
        """Size of the values of `num` entries in bytes; with ragged fields, by the mean over all entries."""
        return num * self.payload_bytes // self.num


@dataclass(frozen=True)
class Pack:
    """One pack's layout: its id, the size of its file, and its groups in row order."""

    id: str
    file_bytes: int
    groups: tuple[RowGroup, ...]

    @cached_property
    def num_entries(self) -> int:
        """Number of rows, live or not."""
        return self.ends[-1]

    @cached_property
    def payload_bytes(self) -> int:
        """Size of the values of all written entries in bytes, live or not."""
        return sum(group.payload_bytes for group in self.groups)

    @cached_property
    def ends(self) -> list[int]:
        """The end row (exclusive) of each group: row r lies in group number `bisect_right(ends, r)`."""
        return [group.first + group.num for group in self.groups]

    def group_of(self, row: int) -> RowGroup:
        """The group that holds a row."""
        return self.groups[bisect_right(self.ends, row)]

    def to_json(self) -> list[Any]:
        """The groups as JSON, for `_parsed_head`."""
        return [
            [g.kind, g.num, [[c.field, c.dtype, c.shape, c.start, c.num_rows, c.offsets_start] for c in g.columns]]
            for g in self.groups
        ]


class Location(msgspec.Struct, frozen=True, gc=False):  # one per entry and batch: a NamedTuple takes longer to make
    """Where one entry lies: a row of a pack. `digest` is its payload's digest (`entry.payload_digest`), 16 bytes."""

    pack: Pack
    row: int
    digest: bytes
    group: RowGroup


def byte_ranges(locations: Iterable[Location]) -> list[tuple[int, int]]:
    """The byte ranges (offset, length) of these entries in their pack: of each field, or of its offsets if ragged."""
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
    """One pack's row in the index: `keys` [n, 32], `digests` [n, 16] (uint8) and `live` [n] (bool) of its entries.

    An entry that is not live was removed, was found damaged, or is live in another pack. `reasons` maps the rows of
    damaged entries to what is wrong with them.
    """

    pack: Pack
    keys: np.ndarray
    digests: np.ndarray
    live: np.ndarray
    reasons: dict[int, str] = field(default_factory=dict)

    @classmethod
    def new(cls, pack: Pack, keys: np.ndarray, digests: np.ndarray) -> PackRow:
        """The row of a new pack, in which all entries are live."""
        return cls(pack, keys, digests, np.ones(len(keys), bool))

    def to_bytes(self) -> bytes:
        """Serialize the row for the index, with a checksum at the end. `from_bytes` is the inverse."""
        reasons: dict[str, list[int]] = {}  # all entries of a lost pack share one
        for row, reason in self.reasons.items():
            reasons.setdefault(reason, []).append(row)
        value = {"file_bytes": self.pack.file_bytes, "groups": self.pack.to_json(), "reasons": reasons}
        head = json.dumps(value, separators=(",", ":")).encode("ascii")
        arrays = (self.keys.tobytes(), self.digests.tobytes(), np.packbits(self.live).tobytes())
        data = b"".join((len(head).to_bytes(4, "little"), head, *arrays))
        return data + xxhash.xxh3_64(data).digest()

    @classmethod
    def from_bytes(cls, pack: str, data: bytes) -> PackRow:
        """Parse what `to_bytes` wrote for this pack. ValueError for anything else."""
        body = data[:-_CRC_BYTES]
        if len(data) < 4 + _CRC_BYTES or xxhash.xxh3_64(body).digest() != data[-_CRC_BYTES:]:
            raise ValueError("its bytes do not match their checksum")
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
            raise ValueError(f"its size is not that of a row for {num:,} entries")
        keys = np.frombuffer(body, np.uint8, sizes[0], at).reshape(num, KEY_BYTES)
        digests = np.frombuffer(body, np.uint8, sizes[1], at + sizes[0]).reshape(num, DIGEST_BYTES)
        live = np.unpackbits(np.frombuffer(body, np.uint8, sizes[2], at + sizes[0] + sizes[1]), count=num).view(bool)
        return cls(layout, keys, digests, live, reasons)

    def key(self, row: int) -> str:
        """The key of one row."""
        return str(self.keys[row].tobytes().hex())

    def names(self) -> list[str]:
        """The keys as text, in row order."""
        return key_names(self.keys)

    def location(self, row: int) -> Location:
        """The location of a row's entry."""
        return Location(self.pack, row, self.digests[row].tobytes(), self.pack.group_of(row))

    def damaged(self) -> dict[str, str]:
        """The reason for each damaged entry, by key."""
        return dict(zip(key_names(self.keys[list(self.reasons)]), self.reasons.values(), strict=True))


def drop_copies(rows: Sequence[PackRow]) -> None:
    """Keep each key live only in the first of the rows that have it live."""
    if not rows:
        return
    live = np.flatnonzero(np.concatenate([row.live for row in rows]))
    keys = np.concatenate([row.keys for row in rows])[live]
    first = np.zeros(sum(len(row.keys) for row in rows), bool)
    first[live[np.unique(sortable(keys), return_index=True)[1]]] = True
    for row, end in zip(rows, accumulate(len(row.keys) for row in rows), strict=True):
        row.live[:] = first[end - len(row.keys) : end]


@lru_cache(256)  # bounded: the reasons of damaged entries make a head long
def _parsed_head(text: bytes) -> tuple[tuple[RowGroup, ...], int, dict[str, list[int]]]:
    """Parse a row's head into groups, file size, and rows by reason. Cached, since full packs often share a head.

    Do not modify the result.
    """
    value = json.loads(str(text, "ascii"))
    groups, first = list[RowGroup](), 0
    for kind, num, columns in value["groups"]:
        made = [Column(name, dtype, tuple(shape), *numbers) for name, dtype, shape, *numbers in columns]
        groups.append(RowGroup(kind, first, num, tuple(made)))
        first += num
    return tuple(groups), value["file_bytes"], dict(value["reasons"])
