"""Packs: sealed safetensors files that hold many entries.

A pack consists of columns (`layout`): one tensor per field, shape and dtype (`moments/8x128x128`) with a row per entry,
so any tool can open it. Four more tensors describe the entries in row order: `_index/keys` [n, 32], `_index/digests`
[n, 16], and the records as bytes, `_index/records` with `_index/record_offsets` [n + 1]. This keeps the header small
for any number of entries, and lets an index be rebuilt from two arrays without parsing records.

    8 bytes   header (JSON)    keys   digests   offsets   records   moments/8x128x128   hidden/values   hidden/offsets
    |length | padded with ' ' |      |         |         |         |                   |               |             |
            every tensor starts at a multiple of 64 bytes: unaligned copies are up to 5 times slower. safetensors
            allows no holes, so the gap before a tensor is a small tensor itself, `_padding/<i>`
"""

from __future__ import annotations

import json
import math
import mmap
import os
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from latentcache.errors import PackError
from latentcache.identity import digest
from latentcache.store.entry import (
    ALIGNMENT,
    ARRAY_DTYPES,
    EntryArrays,
    OwnedEntry,
    description_of,
    is_field,
    is_kind,
    payload_digest,
    record_of,
)
from latentcache.store.layout import DIGEST_BYTES, KEY_BYTES, Column, Location, Pack, PackRow, RowGroup
from latentcache.types import Record
from latentcache.utils.durable_files import open_to_read, sealed_file, unreadable, write_all

PACK_FORMAT = "2"
DISAGREE = "its pack and the index do not agree; `latentcache rebuild` may restore it"
HEADER_BYTES = 16 << 10
"""Upper bound for the headers that are written, for any number of entries."""
MAX_HEADER_BYTES = 1 << 20
"""Upper bound for the headers that are read; longer ones are refused before parsing."""
_INDEX = _KEYS, _DIGESTS, _OFFSETS, _RECORDS = (
    "_index/keys",
    "_index/digests",
    "_index/record_offsets",
    "_index/records",
)
_PADDING = "_padding/"
_INT64 = np.dtype("<i8")
_SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
_OUR_DTYPES = {theirs: ours for ours, theirs in _SAFETENSORS_DTYPES.items()}

_Tensors = Mapping[str, tuple[str, tuple[int, ...], int]]
"""The tensors of a document by name: dtype, shape, and the offset of the bytes in the file."""

# Writing


def new_pack_id() -> str:
    """32 random hexadecimal digits."""
    return uuid.uuid4().hex


def write_pack(path: Path, entries: Sequence[OwnedEntry]) -> PackRow:
    """Write entries (at least one, distinct keys) durably to a new pack at `path`, whose stem is the pack's id.

    Rows are in the order of `entries`, group by group. StorageFullError leaves nothing behind.
    """
    row, num_bytes, buffers = pack_buffers(path.stem, entries)
    with sealed_file(path, num_bytes) as fd:
        for buffer in buffers:
            write_all(fd, buffer)
    return row


class _Tensor(NamedTuple):
    """A tensor to be written: its dtype, its shape, and the buffers that hold its bytes."""

    dtype: str
    shape: tuple[int, ...]
    parts: Sequence[Any]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ARRAY_DTYPES[self.dtype].itemsize


def _document(metadata: Mapping[str, str], tensors: Mapping[str, _Tensor]) -> tuple[_Tensors, int, list[Any]]:
    """Lay out a safetensors document with these tensors in this order, each aligned to 64 bytes.

    Returns the placed tensors, the document's size, and its parts.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    starts: dict[str, int] = {}
    parts: list[Any] = []
    end = 0
    for name, tensor in tensors.items():
        if gap := -end % ALIGNMENT:
            header[f"{_PADDING}{len(header) - 1}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [end, end + gap]}
            parts.append(bytes(gap))
        starts[name], end = end + gap, end + gap + tensor.num_bytes
        place = {"shape": list(tensor.shape), "data_offsets": [starts[name], end]}
        header[name] = {"dtype": _SAFETENSORS_DTYPES[tensor.dtype]} | place
        parts += tensor.parts
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    first = 8 + len(text)
    placed = {name: (tensor.dtype, tensor.shape, first + starts[name]) for name, tensor in tensors.items()}
    return placed, first + end, [len(text).to_bytes(8, "little") + text, *parts]


def _offsets_of(lengths: Sequence[int]) -> np.ndarray:
    """The start of each of n contiguous parts, and the end of the last: int64 [n + 1]."""
    return np.fromiter(accumulate(lengths, initial=0), _INT64, len(lengths) + 1)


def pack_buffers(pack_id: str, entries: Sequence[OwnedEntry]) -> tuple[PackRow, int, Iterator[bytes | memoryview]]:
    """The content of a pack: its row, its size in bytes, and its bytes as consecutive buffers.

    The buffers are views of the entries' arrays, which must not change until they are written.
    """
    groups: dict[Any, list[OwnedEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.spec(), []).append(entry)
    ordered = [entry for members in groups.values() for entry in members]
    keys = np.frombuffer(bytes.fromhex("".join([entry.key for entry in ordered])), np.uint8).reshape(-1, KEY_BYTES)
    digests = np.frombuffer(b"".join([entry.digest() for entry in ordered]), np.uint8).reshape(-1, DIGEST_BYTES)
    records = [entry.record for entry in ordered]
    record_offsets = _offsets_of([len(record) for record in records])

    listed: list[Any] = []
    columns: dict[str, _Tensor] = {}
    for number, ((kind, fields), members) in enumerate(groups.items()):
        names = []
        for (name, dtype, shape, is_ragged), *parts in zip(fields, *[m.values.arrays for m in members], strict=True):
            title = f"{name}/values" if is_ragged else f"{name}/{'x'.join(map(str, shape)) or 'scalar'}"
            ending = f"/{number}" if title in columns else ""  # groups that differ in another field or in the dtype
            title, offsets_title, num_rows = title + ending, None, len(parts)
            if is_ragged:
                offsets_title, offsets = f"{name}/offsets{ending}", _offsets_of([part.shape[1] for part in parts])
                columns[offsets_title] = _Tensor("int64", offsets.shape, [offsets])
                num_rows = int(offsets[-1])
            columns[title] = _Tensor(dtype, (num_rows, *shape), parts)
            names.append([name, title, offsets_title])
        listed.append([kind, len(members), names])
    groups_text = json.dumps(listed, separators=(",", ":"))
    metadata = {
        "latentcache": PACK_FORMAT,
        "groups": groups_text,
        "index_digest": _index_digest(groups_text, keys, digests),
        "records_digest": _records_digest(record_offsets, b"".join(records)),
    }
    index = [
        _Tensor("uint8", keys.shape, [keys]),
        _Tensor("uint8", digests.shape, [digests]),
        _Tensor("int64", record_offsets.shape, [record_offsets]),
        _Tensor("uint8", (int(record_offsets[-1]),), records),
    ]
    # Columns whose size is a multiple of 64 come first: no padding is needed between them.
    by_ending = sorted(columns.items(), key=lambda item: (item[1].num_bytes % ALIGNMENT != 0, item[0]))
    placed, num_bytes, buffers = _document(metadata, dict(zip(_INDEX, index, strict=True)) | dict(by_ending))
    row = PackRow.new(Pack(pack_id, num_bytes, _groups_of(listed, placed)), keys, digests)
    return row, num_bytes, (b if isinstance(b, bytes) else b.reshape(-1).view(np.uint8).data for b in buffers)


def _index_digest(groups: str, keys: np.ndarray, digests: np.ndarray) -> str:
    return digest(f"{PACK_FORMAT}\n{groups}\n".encode() + keys.tobytes() + digests.tobytes())


def _records_digest(offsets: np.ndarray, records: bytes) -> str:
    return blake3(offsets.tobytes()).update(records).hexdigest()


# Reading


Read = Callable[[int, int], bytes | memoryview]
"""Reads bytes of a pack: (offset, number) -> bytes, fewer at the end of the pack."""


def _header(read: Read, file_bytes: int) -> tuple[Mapping[str, str], _Tensors]:
    """The metadata and tensors. ValueError or the like if the header is invalid or does not fit the file."""
    num_bytes = int.from_bytes(read(0, 8), "little")
    if num_bytes > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {num_bytes:,} bytes; at most {MAX_HEADER_BYTES:,} are allowed")
    # Parsed here, so that reading does not depend on a release of safetensors.
    header = json.loads(str(read(8, num_bytes), "utf-8"))
    metadata = header.pop("__metadata__", {})
    found = metadata.get("latentcache")
    if found != PACK_FORMAT:
        raise ValueError(f"pack format {found!r:.50}, this version reads {PACK_FORMAT!r}. Run precache again.")
    data_start, end = 8 + num_bytes, 0
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = _OUR_DTYPES[entry["dtype"]], tuple(entry["shape"])
        # safetensors requires this: no holes, no overlaps, no bytes after the last tensor.
        start, end = end, end + math.prod(shape) * ARRAY_DTYPES[dtype].itemsize
        is_shape = all(type(size) is int and size >= 0 for size in shape)
        if not is_shape or entry["data_offsets"] != [start, end]:
            raise ValueError(f"{name!r:.80} of shape {shape!r:.80} lies at {entry['data_offsets']!r:.80}")
        tensors[name] = dtype, shape, data_start + start
    if data_start + end != file_bytes:
        raise ValueError(f"it has {file_bytes:,} bytes, but its header says {data_start + end:,}")
    return metadata, tensors


def _groups_of(listed: Any, tensors: _Tensors) -> tuple[RowGroup, ...]:
    """The groups that a header lists. ValueError or the like if they do not match its tensors."""
    groups: list[RowGroup] = []
    first = 0
    for kind, num, fields in listed:
        columns, names = [], [name for name, _, _ in fields]
        if not is_kind(kind) or not names or not all(map(is_field, names)) or names != sorted(set(names)):
            raise ValueError(f"a group has an invalid kind or invalid fields: {kind!r:.80} with {names!r:.80}")
        for name, values, offsets in fields:
            dtype, (num_rows, *shape), start = tensors[values]
            fits = num_rows == num if offsets is None else tensors[offsets][:2] == ("int64", (num + 1,))
            if num < 1 or not fits or 0 in shape:
                raise ValueError(f"field {name!r:.80}: {num_rows:,} rows of {shape} for {num:,} entries")
            offsets_start = None if offsets is None else tensors[offsets][2]
            columns.append(Column(name, dtype, tuple(shape), start, num_rows, offsets_start))
        groups.append(RowGroup(kind, first, num, tuple(columns)))
        first += num
    return tuple(groups)


def row_in(path: Path | str, file_bytes: int, read: Read) -> tuple[PackRow, Mapping[str, int], Mapping[str, str]]:
    """Parse a pack of `file_bytes`: its row (see `read_row`), the offsets of its tensors, and its metadata.

    `path` identifies it in errors, and its stem is the pack's id. Errors from `read` propagate.
    """

    def exactly(offset: int, number: int) -> bytes | memoryview:
        data = read(offset, number)
        if len(data) != number:
            raise ValueError(f"it ends after {offset + len(data):,} bytes, but {offset + number:,} are needed")
        return data

    try:
        metadata, tensors = _header(exactly, file_bytes)
        pack = Pack(PurePath(path).stem, file_bytes, _groups_of(json.loads(metadata["groups"]), tensors))
        num = pack.num_entries
        index = [("uint8", (num, KEY_BYTES)), ("uint8", (num, DIGEST_BYTES)), ("int64", (num + 1,))]
        if [tensors[name][:2] for name in _INDEX[:-1]] != index or tensors[_RECORDS][0] != "uint8":
            raise ValueError(f"its groups have {num:,} entries, but its `_index` tensors do not")
        starts = {name: start for name, (_, _, start) in tensors.items()}
        keys = np.frombuffer(exactly(starts[_KEYS], num * KEY_BYTES), np.uint8).reshape(num, KEY_BYTES)
        digests = np.frombuffer(exactly(starts[_DIGESTS], num * DIGEST_BYTES), np.uint8).reshape(num, DIGEST_BYTES)
        if metadata["index_digest"] != _index_digest(metadata["groups"], keys, digests):
            raise ValueError("its keys and digests do not match their stored digest")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise PackError(path, f"not a pack: {error!s:.200}") from error
    except MemoryError as error:
        raise unreadable(path, error) from error
    return PackRow.new(pack, keys, digests), starts, metadata


def read_row(path: Path) -> PackRow:
    """Read and check only a pack's header, keys and digests. PackError if they are not as written.

    FileNotFoundError if there is no such file. A plain StoreError means that the file cannot be read now; it says
    nothing about its content.
    """
    with os.fdopen(open_to_read(path), "rb") as file:

        def read(offset: int, number: int) -> bytes:
            file.seek(offset)
            return file.read(number)

        try:
            return row_in(path, os.fstat(file.fileno()).st_size, read)[0]
        except OSError as error:
            raise unreadable(path, error) from error


def map_pack(path: Path, num_bytes: int) -> np.ndarray:
    """Map the first `num_bytes` of a file as a flat uint8 array, which must not be written to.

    PackError if the file is shorter: touching the missing bytes would kill the process (SIGBUS). FileNotFoundError and
    StoreError as for `read_row`.
    """
    import torch

    with os.fdopen(open_to_read(path), "rb") as file:
        fd = file.fileno()
        if (file_bytes := os.fstat(fd).st_size) < num_bytes:
            raise PackError(path, f"has {file_bytes:,} bytes, but was written with {num_bytes:,}")
        # Not mmap.mmap, which keeps a descriptor per pack open: a large cache has more packs than descriptors.
        # A private mapping, so that a stray write cannot reach the file.
        # Opened through the descriptor where that has a path: the file may have been unlinked meanwhile.
        source = f"/dev/fd/{fd}" if os.path.exists(f"/dev/fd/{fd}") else str(path)
        try:
            return torch.from_file(source, shared=False, size=num_bytes, dtype=torch.uint8, device="cpu").numpy()
        except (RuntimeError, OSError, MemoryError) as error:
            raise unreadable(path, error) from error


def arrays_in(data: np.ndarray, key: str, location: Location, *, verify: bool = True) -> EntryArrays | str:
    """The entry in `data` (of `map_pack`): an array [1, *shape] per field, or the reason why it is damaged.

    Without `verify` its digest is not compared.
    """
    group, at = location.group, location.row - location.group.first
    arrays = []
    for column in group.columns:
        start, shape = column.start + at * column.row_bytes, column.shape
        if column.offsets_start is not None:
            first, end = np.ndarray((2,), _INT64, data, column.offsets_start + at * _INT64.itemsize).tolist()
            if not 0 <= first < end <= column.num_rows:
                return f"values {first} ... {end} of field {column.field}, which has {column.num_rows}"
            start, shape = column.start + first * column.row_bytes, (end - first, *column.shape)
        arrays.append(np.ndarray((1, *shape), ARRAY_DTYPES[column.dtype], data, start))
    description = group.description
    if group.ragged:
        fields = zip(group.columns, arrays, strict=True)
        description = description_of(*[(column.field, column.dtype, array.shape[1:]) for column, array in fields])
    if verify and (found := payload_digest(key, description, arrays)) != location.digest:
        return f"digest {found.hex()}, stored as {location.digest.hex()}"
    return EntryArrays(description, tuple(arrays))


@dataclass(frozen=True, slots=True, eq=False)
class WholePack:
    """A pack with all of its bytes (`data`: flat uint8), for reading records and for checking or copying entries.

    `row` is the pack's row, with all entries live. The JSON of row i is `records[offsets[i]:offsets[i + 1]]`.
    """

    row: PackRow
    offsets: np.ndarray
    records: bytes
    data: np.ndarray

    @classmethod
    def in_file(cls, path: Path, fd: int | None = None) -> WholePack:
        """Map the pack at `path`, or the open file `fd` that will be moved there. Errors as for `read_row`."""
        if fd is None:
            with os.fdopen(open_to_read(path), "rb") as file:
                return cls.in_file(path, file.fileno())
        if not os.fstat(fd).st_size:
            raise PackError(path, "is empty")
        try:
            data = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        except (ValueError, OSError, MemoryError) as error:
            raise unreadable(path, error) from error
        return cls.in_memory(path, data)

    @classmethod
    def in_memory(cls, path: Path | str, data: bytes | memoryview | mmap.mmap) -> WholePack:
        """Parse a pack whose values are views of `data`. Its id is the stem of `path`. PackError."""
        data = memoryview(data).cast("B")
        # All but the values is copied: truncating the file later must not affect the records that are kept.
        row, starts, metadata = row_in(path, len(data), lambda at, number: bytes(data[at : at + number]))
        first = starts[_OFFSETS]
        offsets = np.frombuffer(bytes(data[first : first + (len(row.keys) + 1) * _INT64.itemsize]), _INT64)
        records = bytes(data[starts[_RECORDS] : starts[_RECORDS] + int(offsets[-1])])
        if metadata.get("records_digest") != _records_digest(offsets, records):
            raise PackError(path, "the records do not match their stored digest")
        return cls(row, offsets, records, np.frombuffer(data, np.uint8))

    def is_at(self, key: str, location: Location) -> bool:
        """Whether the pack has this key at this location, with the layout and digest that the index lists."""
        at = location.row
        return at < len(self.row.keys) and self.row.key(at) == key and self.row.location(at) == location

    def json(self, at: int) -> bytes:
        """The JSON of one record."""
        return self.records[self.offsets[at] : self.offsets[at + 1]]

    def record(self, at: int) -> Record:
        """The record of one row. ValueError if it is invalid or its identity gives another key."""
        return record_of(self.row.key(at), self.row.pack.group_of(at).kind, self.json(at))

    def verified(self, key: str, location: Location) -> EntryArrays | str:
        """The entry's arrays at the location in the index, or the reason why it is damaged."""
        return arrays_in(self.data, key, location) if self.is_at(key, location) else DISAGREE

    def problem(self, key: str, location: Location) -> str | None:
        """The reason why an entry's payload or record is damaged, or None if both are intact."""
        found = self.verified(key, location)
        if isinstance(found, str):
            return found
        try:
            self.record(location.row)
        except ValueError as error:
            return str(error)
        return None

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield the key of each damaged entry, and the reason."""
        for at, key in enumerate(self.row.names()):
            if (problem := self.problem(key, self.row.location(at))) is not None:
                yield key, problem

    def checked_row(self, path: Path) -> PackRow:
        """Check every entry and return the pack's row. PackError naming `path` if one is damaged."""
        for key, problem in self.problems():
            raise PackError(path, f"entry {key}: {problem}")
        return self.row

    def entry(self, key: str, location: Location) -> OwnedEntry | str:
        """The entry, with values that are views of the pack, or the reason why it is damaged."""
        found, group = self.verified(key, location), location.group
        if isinstance(found, str):
            return found
        return OwnedEntry(key, group.kind, self.json(location.row), found, group.ragged)

    def part(self, keys: Collection[str]) -> tuple[PackRow, bytes]:
        """Copy these entries into a new pack in memory. PackError if one is damaged."""
        entries = []
        for at, key in enumerate(self.row.names()):
            if key in keys:
                entry = self.entry(key, self.row.location(at))
                if isinstance(entry, str):
                    raise PackError(self.row.pack.id, f"entry {key}: {entry}")
                entries.append(entry)
        row, _, buffers = pack_buffers(new_pack_id(), entries)
        return row, b"".join(buffers)
