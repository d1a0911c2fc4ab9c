"""Packs: sealed safetensors files that hold many entries (`tensor_file`).

A pack is a file of columns (`layout`): one tensor per field, shape and dtype (`moments/8x128x128`), a row per entry, so
that any tool can open it. Four more tensors describe the entries, in the order of the rows: `_index/keys` [n, 32],
`_index/digests` [n, 16], and the records as bytes, `_index/records` with `_index/record_offsets` [n + 1]. So the header
stays small whatever the number of entries, and an index is rebuilt from two arrays without parsing a record.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from latentcache.errors import PackError
from latentcache.identity import digest
from latentcache.store.base import (
    ALIGNMENT,
    ARRAY_DTYPES,
    DTYPES,
    EntryArrays,
    OwnedEntry,
    flat_bytes,
    payload_digest,
    record_of,
)
from latentcache.store.layout import (
    DIGEST_BYTES,
    KEY_BYTES,
    Location,
    Pack,
    PackRow,
    description_of,
    pack_from_json,
)
from latentcache.store.tensor_file import (
    FileBytes,
    MemoryBytes,
    NamedTensor,
    TensorDocument,
    aligned,
    read_header,
    starts_of,
)
from latentcache.types import Record
from latentcache.utils.durable_files import open_regular, sealed_file, unreadable, write_all

PACK_FORMAT = "2"
HEADER_BYTES = 16 << 10
"""The header of a pack stays below, whatever the number of its entries."""
_KEYS, _DIGESTS, _OFFSETS, _RECORDS = "_index/keys", "_index/digests", "_index/record_offsets", "_index/records"
_INT64 = np.dtype("<i8")


@dataclass(frozen=True, slots=True, eq=False)
class PackRecords:
    """The records of a pack: the JSON of row i is `data[offsets[i]:offsets[i + 1]]`."""

    row: PackRow
    offsets: np.ndarray
    data: bytes | memoryview

    def is_at(self, key: str, location: Location) -> bool:
        """Whether this key and digest are those of the location's row."""
        own, at = self.row, location.row
        if at >= len(own.keys) or own.key(at) != key or own.digests[at].tobytes() != location.digest:
            return False
        return own.pack.groups == location.pack.groups

    def json(self, at: int) -> bytes:
        """The JSON of a row's record."""
        return bytes(self.data[self.offsets[at] : self.offsets[at + 1]])

    def record(self, at: int) -> Record:
        """The record of a row. ValueError if it is none, or if the key does not follow from its identity."""
        return record_of(self.row.key(at), self.row.pack.group_of(at).kind, self.json(at))


class PackableEntry(Protocol):
    """What a pack is made of: `base.OwnedEntry`, or an entry that lies in another pack (`exchange.StoredEntry`)."""

    @property
    def key(self) -> str:
        """64 hexadecimal digits."""

    @property
    def record(self) -> bytes:
        """Identity and provenance as JSON."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor] | Mapping[str, np.ndarray]:
        """The fields' values."""

    def spec(self) -> tuple[Any, ...]:
        """What entries of one group share."""

    def digest(self) -> bytes:
        """The payload's digest."""


def new_pack_id() -> str:
    """32 random hexadecimal digits."""
    return uuid.uuid4().hex


def write_pack(path: Path, entries: Sequence[OwnedEntry]) -> PackRow:
    """Write entries (keys distinct, at least one) to a new pack at `path`, durably.

    The rows are in the order of `entries`, group by group. The file's stem is the pack's id. StorageFullError leaves
    nothing behind.
    """
    row, num_bytes, buffers = pack_buffers(path.stem, entries)
    with sealed_file(path, num_bytes) as fd:
        for buffer in buffers:
            write_all(fd, buffer)
    return row


def pack_buffers(pack_id: str, entries: Sequence[PackableEntry]) -> tuple[PackRow, int, Iterator[bytes | memoryview]]:
    """What `write_pack` writes: the row, how many bytes there are, and these, one buffer after the other.

    The buffers are views of the entries' tensors: nothing is copied, and the tensors must not change meanwhile.
    """
    groups: dict[Any, list[PackableEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.spec(), []).append(entry)
    ordered = [entry for members in groups.values() for entry in members]
    keys = np.frombuffer(bytes.fromhex("".join([entry.key for entry in ordered])), np.uint8).reshape(-1, KEY_BYTES)
    digests = np.frombuffer(b"".join([entry.digest() for entry in ordered]), np.uint8).reshape(-1, DIGEST_BYTES)
    records = [entry.record for entry in ordered]
    offsets = np.fromiter(accumulate(map(len, records), initial=0), _INT64, len(records) + 1)

    listed: list[Any] = []
    columns: list[NamedTensor] = []
    for number, ((kind, fields), members) in enumerate(groups.items()):
        names = [_columns_of(columns, number, field, members) for field in fields]
        listed.append([kind, len(members), names])
    # Columns that end on 64 bytes come first: then at most the others need padding.
    columns.sort(key=lambda tensor: (tensor.num_bytes % ALIGNMENT != 0, tensor.name))
    tensors = aligned(
        [
            NamedTensor(_KEYS, "uint8", keys.shape, [keys]),
            NamedTensor(_DIGESTS, "uint8", digests.shape, [digests]),
            NamedTensor(_OFFSETS, "int64", offsets.shape, [offsets]),
            NamedTensor(_RECORDS, "uint8", (int(offsets[-1]),), records),
            *columns,
        ]
    )
    groups_text = json.dumps(listed, separators=(",", ":"))
    metadata = {
        "latentcache": PACK_FORMAT,
        "groups": groups_text,
        "index_digest": _index_digest(groups_text, keys, digests),
        "records_digest": _records_digest(offsets, b"".join(records)),
    }
    document = TensorDocument.of(metadata, tensors)
    pack = _pack_of(pack_id, document.num_bytes, len(document.head), listed, tensors)
    return PackRow.new(pack, keys, digests), document.num_bytes, document.buffers()


def _columns_of(
    columns: list[NamedTensor],
    number: int,
    field: tuple[str, str, tuple[int, ...], bool],
    members: Sequence[PackableEntry],
) -> list[str | None]:
    """Add the tensors of one field of a group. Returns the names of the field, its values, and its offsets or None."""
    name, dtype, shape, is_ragged = field
    parts = [entry.tensors[name] for entry in members]
    title = f"{name}/values" if is_ragged else f"{name}/{'x'.join(map(str, shape)) or 'scalar'}"
    taken = {tensor.name for tensor in columns}
    ending = f"/{number}" if title in taken else ""  # groups that differ elsewhere, or in the dtype
    if not is_ragged:
        columns.append(NamedTensor(title + ending, dtype, (len(parts), *shape), parts))
        return [name, title + ending, None]
    offsets = np.fromiter(accumulate(map(len, parts), initial=0), _INT64, len(parts) + 1)
    columns.append(NamedTensor(title + ending, dtype, (int(offsets[-1]), *shape), parts))
    columns.append(NamedTensor(f"{name}/offsets{ending}", "int64", offsets.shape, [offsets]))
    return [name, title + ending, f"{name}/offsets{ending}"]


def _index_digest(groups: str, keys: np.ndarray, digests: np.ndarray) -> str:
    return digest(f"{PACK_FORMAT}\n{groups}\n".encode() + keys.tobytes() + digests.tobytes())


def _records_digest(offsets: np.ndarray, records: bytes | memoryview) -> str:
    return digest(b"".join((offsets.tobytes(), records)))


def _pack_of(pack: str, file_bytes: int, data_start: int, listed: Any, tensors: Sequence[NamedTensor]) -> Pack:
    """The layout that the groups of a header and its tensors give. ValueError if they do not fit together."""
    starts = starts_of(tensors, data_start)
    by_name = {tensor.name: tensor for tensor in tensors}
    try:
        groups = []
        for kind, num, names in listed:
            columns = []
            for field, values, offsets in names:
                tensor = by_name[values]
                offsets_start = None if offsets is None else starts[offsets]
                if offsets is not None and (by_name[offsets].dtype, by_name[offsets].shape) != ("int64", (num + 1,)):
                    raise ValueError(f"{offsets!r:.80} is not int64 [{num + 1}]")
                columns.append(
                    [field, tensor.dtype, list(tensor.shape[1:]), starts[values], tensor.shape[0], offsets_start]
                )
            groups.append([kind, num, columns])
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"its groups do not fit its tensors: {error!r:.200}") from error
    return pack_from_json(pack, file_bytes, groups)


def read_row(path: Path) -> PackRow:
    """Read and check a pack's header, keys and digests, and nothing else. PackError if they are not as written.

    UnsafeStoreError for a link or a device; FileNotFoundError if there is no such file. A plain StoreError says that
    the file cannot be read now, and nothing about what it holds.
    """
    fd = open_regular(path)
    try:
        return row_in(path.stem, FileBytes(path, fd))[0]
    finally:
        os.close(fd)


def read_records(path: Path) -> PackRecords:
    """As `read_row`, with the records of the entries. They are compared with their digest, not parsed."""
    fd = open_regular(path)
    try:
        return read_open_records(path, fd)
    finally:
        os.close(fd)


def read_open_records(path: Path, fd: int) -> PackRecords:
    """As `read_records`, of an open file that is to lie at `path`, and may have another name still."""
    return records_in(path.stem, FileBytes(path, fd))


def read_pack_bytes(data: bytes | memoryview, name: str) -> PackRecords:
    """As `read_records`, of a pack in memory, of which the result has views. `name` is its id, and names it in errors.

    `verified_arrays` reads its entries: it takes the bytes as `np.frombuffer(data, np.uint8)`.
    """
    return records_in(name, MemoryBytes(name, data))


def records_in(pack: str, source: FileBytes | MemoryBytes) -> PackRecords:
    """As `read_records`, of the pack with this id, wherever its bytes are."""
    row, starts, metadata = row_in(pack, source)
    offsets = np.frombuffer(source.read(starts[_OFFSETS], (len(row.keys) + 1) * _INT64.itemsize), _INT64)
    sizes = np.diff(offsets)
    if offsets[0] != 0 or (sizes < 0).any() or offsets[-1] > source.num_bytes - starts[_RECORDS]:
        raise PackError(source.path, "the offsets of the records do not ascend, or lie outside of the file")
    data = source.read(starts[_RECORDS], int(offsets[-1]))
    if metadata.get("records_digest") != _records_digest(offsets, data):
        raise PackError(source.path, "the records do not have the digest that was stored with them")
    return PackRecords(row, offsets, data)


def row_in(pack_id: str, source: FileBytes | MemoryBytes) -> tuple[PackRow, Mapping[str, int], Mapping[str, str]]:
    """As `read_row`, wherever the bytes are: the row, where each tensor starts, and the metadata."""
    path = source.path

    def check_format(metadata: Mapping[str, str]) -> None:
        found = metadata.get("latentcache")
        if found != PACK_FORMAT:
            raise PackError(path, f"pack format {found!r:.50}, this version reads {PACK_FORMAT!r}. Run precache again.")

    header = read_header(source, check_format)
    metadata = header.metadata
    try:
        groups = json.loads(metadata["groups"])
        pack = _pack_of(pack_id, source.num_bytes, header.data_start, groups, header.tensors)
    except (ValueError, KeyError, RecursionError) as error:
        raise PackError(path, f"not a pack: {error}") from error
    starts = starts_of(header.tensors, header.data_start)
    num, shapes = pack.num_entries, {t.name: (t.dtype, t.shape) for t in header.tensors}
    expected = {
        _KEYS: ("uint8", (num, KEY_BYTES)),
        _DIGESTS: ("uint8", (num, DIGEST_BYTES)),
        _OFFSETS: ("int64", (num + 1,)),
    }
    if any(shapes.get(name) != shape for name, shape in expected.items()) or _RECORDS not in shapes:
        raise PackError(path, f"its groups have {num:,} entries, but its index has not")
    keys = np.frombuffer(source.read(starts[_KEYS], num * KEY_BYTES), np.uint8).reshape(num, KEY_BYTES)
    digests = np.frombuffer(source.read(starts[_DIGESTS], num * DIGEST_BYTES), np.uint8).reshape(num, DIGEST_BYTES)
    if metadata.get("index_digest") != _index_digest(metadata["groups"], keys, digests):
        raise PackError(path, "its keys and digests do not have the digest that was stored with them")
    if len(np.unique(keys, axis=0)) != num:
        raise PackError(path, "a key is listed twice")
    return PackRow.new(pack, keys, digests), starts, metadata


def map_pack(path: Path, min_bytes: int, max_bytes: int = 0) -> np.ndarray:
    """The first bytes of the file as a mapped, flat uint8 array, which must not be written to.

    They are `min_bytes`, or as many as there are up to `max_bytes`: what follows a pack's own bytes may be endless.
    PackError if it is shorter than `min_bytes`: touching what is missing would kill the process (SIGBUS).
    UnsafeStoreError, FileNotFoundError and StoreError as for `read_row`.
    """
    fd = open_regular(path)
    try:
        return map_open_pack(path, fd, min_bytes, max_bytes)
    finally:
        os.close(fd)


def map_open_pack(path: Path, fd: int, min_bytes: int, max_bytes: int = 0) -> np.ndarray:
    """As `map_pack`, of an open file, which may be closed afterwards. `path` names it in errors."""
    try:
        file_bytes = os.fstat(fd).st_size
        if file_bytes < min_bytes:
            raise PackError(path, f"has {file_bytes:,} bytes, its entries need {min_bytes:,}")
        # Not mmap.mmap: it keeps a descriptor per pack open, and a large cache has more packs than descriptors.
        # The mapping is private, so a stray write could not reach the file.
        num_bytes = max(min_bytes, min(max_bytes, file_bytes))
        mapped = torch.from_file(f"/dev/fd/{fd}", shared=False, size=num_bytes, dtype=torch.uint8, device="cpu")
        return mapped.numpy()
    except (RuntimeError, OSError, MemoryError) as error:
        raise unreadable(path, error) from error


def arrays_in(data: np.ndarray, location: Location) -> EntryArrays:
    """Where the entry can be read in `data`, which `map_pack` gave: an array [1, *shape] for each field.

    ValueError if the offsets of a ragged field lie outside of the field's values.
    """
    group, at = location.group, location.row - location.group.first
    arrays = []
    for column in group.columns:
        start, shape = column.start + at * column.row_bytes, column.shape
        if column.offsets_start is not None:
            first, end = np.ndarray((2,), _INT64, data, column.offsets_start + at * _INT64.itemsize).tolist()
            if not 0 <= first < end <= column.num_rows:
                raise ValueError(f"values {first} ... {end} of field {column.field}, which has {column.num_rows}")
            start, shape = column.start + first * column.row_bytes, (end - first, *column.shape)
        arrays.append(np.ndarray((1, *shape), ARRAY_DTYPES[column.dtype], data, start))
    if not group.ragged:
        return EntryArrays(group.description, tuple(arrays))
    fields = [(c.field, c.dtype, a.shape[1:]) for c, a in zip(group.columns, arrays, strict=True)]
    return EntryArrays(description_of(*fields), tuple(arrays))


def read_entry(found: EntryArrays, records: PackRecords, location: Location) -> OwnedEntry:
    """A copy of the entry that `verified_arrays` found."""
    tensors = {}
    for (name, (dtype, shape)), array in zip(found.description.items(), found.arrays, strict=True):
        tensor = torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
        np.copyto(flat_bytes(tensor), array.reshape(-1).view(np.uint8))
        tensors[name] = tensor
    group, at = location.group, location.row
    return OwnedEntry(records.row.key(at), group.kind, records.json(at), tensors, group.ragged)


def row_problem(records: PackRecords, data: np.ndarray, at: int) -> str | None:
    """Why an entry is not what was stored: by its payload, which lies in `data`, or by its record. None: it is."""
    found = verified_arrays(data, records.row.key(at), records.row.location(at))
    if isinstance(found, str):
        return found
    try:
        records.record(at)
    except ValueError as error:
        return str(error)
    return None


def verified_arrays(data: np.ndarray, key: str, location: Location) -> EntryArrays | str:
    """The entry's arrays in `data`, which `map_pack` gave and in which it ends, or why they are not what was stored."""
    try:
        found = arrays_in(data, location)
    except ValueError as error:
        return str(error)
    digest_now = payload_digest(key, found.description, found.arrays)
    return found if digest_now == location.digest else f"digest {digest_now.hex()}, stored as {location.digest.hex()}"
