"""Packs: sealed safetensors files that hold many entries. Only this file imports safetensors.

A pack is a file of columns: one tensor per field, shape and dtype (`moments/8x128x128`), a row per entry, so that
any tool can open it and a row's place is arithmetic. Its records are JSON in the file's metadata. The header is padded
so that data starts on 64 bytes, and so does every column: unaligned copies are up to 5 times slower. safetensors
allows no holes, so the gap before a column is itself a small tensor, `_padding/<i>`.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from latentcache.errors import PackError
from latentcache.identity import digest
from latentcache.store.base import ALIGNMENT, DTYPES, dtype_name, entry_digest, flat_bytes, payload_digest
from latentcache.store.location import Location, PackSize, spec_of
from latentcache.store.records import Column, PackedRecord, decode_records, encode_records
from latentcache.types import Entry, Record
from latentcache.utils.durable_files import open_regular, sealed_file, unreadable, write_past_cache

PACK_FORMAT = "1"
PACK_SUFFIX = ".safetensors"

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


@dataclass(frozen=True, slots=True)
class Header:
    """What a pack says about itself: its entries' records and locations, by key."""

    pack: str
    size: PackSize
    records: Mapping[str, Record]
    locations: Mapping[str, Location]


@dataclass(frozen=True, slots=True)
class _Extent:
    """A tensor in the file: `column` is None for padding. `start` counts from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    column: Column | None


def new_pack_id() -> str:
    return uuid.uuid4().hex


def _extents(columns: Sequence[Column]) -> tuple[list[_Extent], int]:
    extents: list[_Extent] = []
    end = num_paddings = 0
    for column in columns:
        gap = -end % ALIGNMENT
        if gap:
            extents.append(_Extent(f"_padding/{num_paddings}", "uint8", (gap,), end, None))
            num_paddings += 1
        start = end + gap
        extents.append(_Extent(column.name, column.dtype, (column.num_rows, *column.shape), start, column))
        end = start + column.num_bytes
    return extents, end


def _columns(entries: Sequence[Entry]) -> tuple[list[Column], list[tuple[tuple[int, int], ...]]]:
    """The columns in file order, and for each entry its (column, row) by field name in order."""
    counts: dict[tuple[str, tuple[int, ...], str], int] = {}
    rows: list[list[tuple[tuple[str, tuple[int, ...], str], int]]] = []
    for entry in entries:
        rows.append([])
        for name in sorted(entry.tensors):
            spec = (name, tuple(entry.tensors[name].shape), dtype_name(entry.tensors[name]))
            rows[-1].append((spec, counts.get(spec, 0)))
            counts[spec] = counts.get(spec, 0) + 1
    dtypes: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, shape, _ in counts:
        dtypes[name, shape] = dtypes.get((name, shape), 0) + 1
    columns = []
    for (name, shape, dtype), num_rows in counts.items():
        title = f"{name}/{'x'.join(map(str, shape)) or 'scalar'}"
        columns.append(Column(title if dtypes[name, shape] == 1 else f"{title}/{dtype}", name, dtype, shape, num_rows))
    # Columns that end on 64 bytes come first: then at most the others need padding.
    columns.sort(key=lambda column: (column.num_bytes % ALIGNMENT != 0, column.name))
    place = {(column.field, column.shape, column.dtype): index for index, column in enumerate(columns)}
    return columns, [tuple((place[spec], row) for spec, row in row_list) for row_list in rows]


def _header_bytes(extents: Sequence[_Extent], records: str) -> bytes:
    header: dict[str, object] = {
        "__metadata__": {"latentcache": PACK_FORMAT, "records": records, "digest": _seal(records)}
    }
    for extent in extents:
        num_bytes = extent.column.num_bytes if extent.column else extent.shape[0]
        header[extent.name] = {
            "dtype": _SAFETENSORS_DTYPES[extent.dtype],
            "shape": list(extent.shape),
            "data_offsets": [extent.start, extent.start + num_bytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _seal(records: str) -> str:
    return digest(f"{PACK_FORMAT}\n{records}".encode())


def write_pack(path: Path, entries: Sequence[Entry]) -> Header:
    """Write entries (as `base.own_entry` gives them, keys distinct) to a new pack at `path`, durably.

    The file's stem is the pack's id. StorageFullError leaves nothing behind.
    """
    columns, rows = _columns(entries)
    packed = [
        PackedRecord(entry.record, entry_digest(entry), entry_rows)
        for entry, entry_rows in zip(entries, rows, strict=True)
    ]
    extents, data_bytes = _extents(columns)
    head = _header_bytes(extents, encode_records(columns, packed))
    members: dict[str, list[torch.Tensor]] = {column.name: [] for column in columns}
    for entry, entry_rows in zip(entries, rows, strict=True):
        for column_index, _ in entry_rows:
            column = columns[column_index]
            members[column.name].append(entry.tensors[column.field])
    with sealed_file(path, len(head) + data_bytes) as fd:
        write_past_cache(fd, _file_parts(head, extents, members))
    return _header(path.stem, len(head) + data_bytes, columns, packed, data_start=len(head))


def _file_parts(
    head: bytes, extents: Sequence[_Extent], members: Mapping[str, Sequence[torch.Tensor]]
) -> Iterator[bytes | memoryview]:
    yield head
    for extent in extents:
        if extent.column is None:
            yield bytes(extent.shape[0])
        else:
            for tensor in members[extent.name]:
                yield flat_bytes(tensor).data


def _header(
    pack: str, file_bytes: int, columns: Sequence[Column], packed: Sequence[PackedRecord], *, data_start: int
) -> Header:
    extents, _ = _extents(columns)
    starts = [data_start + extent.start for extent in extents if extent.column is not None]
    locations = {}
    for item in packed:
        used = [columns[index] for index, _ in item.rows]
        spec = spec_of(item.record.kind, {column.field: (column.dtype, column.shape) for column in used})
        offsets = tuple(starts[index] + row * columns[index].row_bytes for index, row in item.rows)
        locations[item.record.key] = Location(sys.intern(pack), item.digest, spec, offsets)
    size = PackSize(file_bytes, sum(column.num_bytes for column in columns))
    return Header(pack, size, {item.record.key: item.record for item in packed}, locations)


def read_header(path: Path) -> Header:
    """Read and check a pack's header, not its payload. PackError if anything is not as `write_pack` leaves it.

    UnsafeStoreError for a link or a device; FileNotFoundError if there is no such file. A plain StoreError says that
    the file cannot be read now, and nothing about what it holds.
    """
    fd = open_regular(path)
    try:
        file_bytes = os.fstat(fd).st_size
        # By descriptor: the file that was checked is the one that is read. The parser bounds the header, refuses holes
        # and overlaps, and wants the file to end where the last tensor does.
        with safe_open(f"/dev/fd/{fd}", framework="numpy") as file:
            metadata = file.metadata() or {}
            listed = {}
            for name in file.keys():
                part = file.get_slice(name)
                listed[name] = (part.get_dtype(), tuple(part.get_shape()))
    except SafetensorError as error:
        raise PackError(path, f"not a pack: {error}") from error
    except (OSError, MemoryError) as error:
        # Also a FileNotFoundError: safetensors calls every failure to open a file that.
        raise unreadable(path, error) from error
    finally:
        os.close(fd)
    if metadata.get("latentcache") != PACK_FORMAT:
        raise PackError(path, f"pack format {metadata.get('latentcache')!r:.50}, this version reads {PACK_FORMAT!r}")
    records = metadata.get("records", "")
    if metadata.get("digest") != _seal(records):
        raise PackError(path, "the records do not have the digest that was stored with them")
    try:
        columns, packed = decode_records(records)
    except ValueError as error:
        raise PackError(path, str(error)) from error
    extents, data_bytes = _extents(columns)
    if listed != {extent.name: (_SAFETENSORS_DTYPES[extent.dtype], extent.shape) for extent in extents}:
        raise PackError(path, "the tensors listed are not those that the records speak of")
    return _header(path.stem, file_bytes, columns, packed, data_start=file_bytes - data_bytes)


def map_pack(path: Path, min_bytes: int) -> np.ndarray:
    """The whole file as a mapped, flat uint8 array. It must not be written to.

    PackError if it is shorter than `min_bytes`: touching what is missing would kill the process (SIGBUS).
    UnsafeStoreError, FileNotFoundError and StoreError as for `read_header`.
    """
    fd = open_regular(path)
    try:
        file_bytes = os.fstat(fd).st_size
        if file_bytes < min_bytes:
            raise PackError(path, f"has {file_bytes:,} bytes, its entries need {min_bytes:,}")
        # Not mmap.mmap: it keeps a descriptor per pack open, and a large cache has more packs than descriptors.
        # The mapping is private, so a stray write could not reach the file.
        mapped = torch.from_file(f"/dev/fd/{fd}", shared=False, size=file_bytes, dtype=torch.uint8, device="cpu")
        return mapped.numpy()
    except (RuntimeError, OSError, MemoryError) as error:
        raise unreadable(path, error) from error
    finally:
        os.close(fd)


def field_bytes(data: np.ndarray, location: Location) -> dict[str, np.ndarray]:
    """Each field's bytes, by name, in what `map_pack` gave. They share its memory."""
    fields = zip(location.description, location.offsets, location.spec.sizes, strict=True)
    return {name: data[offset : offset + size] for name, offset, size in fields}


def read_entry(data: np.ndarray, record: Record, location: Location) -> Entry:
    """A copy of the entry. `data` is what `map_pack` gave; `check_payload` must have found no fault."""
    tensors = {}
    for name, found in field_bytes(data, location).items():
        dtype, shape = location.description[name]
        tensor = torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
        np.copyto(flat_bytes(tensor), found)
        tensors[name] = tensor
    return Entry(record, tensors)


def check_payload(data: np.ndarray, key: str, location: Location) -> str | None:
    """Why these bytes are not the entry's, or None if they are. `data` is what `map_pack` gave."""
    if data.size < location.end:
        return f"its pack has {data.size:,} bytes, the entry ends at {location.end:,}"
    parts = field_bytes(data, location)
    found = payload_digest(key, {name: (*location.description[name], part) for name, part in parts.items()})
    return None if found == location.digest else f"digest {found}, stored as {location.digest}"
