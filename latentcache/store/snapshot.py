"""A snapshot of the index: its entries as they lie in memory, in one sealed file beside the database. Disposable.

It is read whole and not mapped: what was checked is what is used, and nobody who cuts it short can end the process.
It says which moment of the index it holds. What came later is read from the index; if rows were removed or replaced
since, or anything in the file is not as it was written, the index is read instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from latentcache.errors import StoreError, UnsafeStoreError
from latentcache.store.history import Point
from latentcache.store.location import Location, PackSize, Spec, is_pack_id, parse_location
from latentcache.store.table import COLUMNS, OFFSET, EntryTable, ascends, num_offsets
from latentcache.utils.durable_files import open_regular, sealed_file, write_all

_MAGIC = b"latentcache-entries-1\n".ljust(32, b"\0")
_PREFIX_BYTES = 64  # magic, digest, bytes of the header
_ALIGNMENT = 64
_ARRAYS = (*COLUMNS, "offsets")


class SnapshotDamagedError(StoreError):
    """The file is not as it was written. It is ignored, and made anew."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the index held at `point`: entries, packs and damage."""

    point: Point
    table: EntryTable
    packs: dict[str, PackSize]
    markers: dict[str, str]


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Put a snapshot in place of another, durably. StorageFullError, ReadOnlyError, StoreError: that one stays."""
    table = snapshot.table
    header = {
        "point": asdict(snapshot.point),
        "num_entries": len(table),
        "num_offsets": len(table.offsets),
        "pack_ids": table.pack_ids,
        "specs": [_spec_text(spec) for spec in table.spec_list],
        "packs": {pack: size.to_text() for pack, size in snapshot.packs.items()},
        "markers": snapshot.markers,
    }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    parts = [text + b" " * (-len(text) % _ALIGNMENT)]
    for name in _ARRAYS:
        data = np.ascontiguousarray(getattr(table, name)).reshape(-1).view(np.uint8)
        parts += [data.data, bytes(-len(data) % _ALIGNMENT)]
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    prefix = _MAGIC + hasher.digest() + len(parts[0]).to_bytes(16, "little")
    with sealed_file(path, _PREFIX_BYTES + sum(map(len, parts))) as fd:
        write_all(fd, [prefix, *parts])


def _spec_text(spec: Spec) -> str:
    return Location("0" * 32, "0" * 32, spec, (0,) * len(spec.sizes)).to_text()


def read_snapshot(path: Path, max_bytes: int) -> Snapshot | None:
    """The snapshot at `path`, or None if there is none. SnapshotDamagedError if it is not what was written.

    `max_bytes`: one that is larger is not even read. A plain StoreError: it cannot be read now.
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return None
    except UnsafeStoreError as error:
        raise SnapshotDamagedError(str(error)) from error
    try:
        num_bytes = os.fstat(fd).st_size
        if not _PREFIX_BYTES <= num_bytes <= max_bytes:
            raise SnapshotDamagedError(f"{path}: has {num_bytes:,} bytes, allowed: {_PREFIX_BYTES} to {max_bytes:,}")
        data = np.empty(num_bytes, dtype=np.uint8)
        end = 0
        while end < num_bytes and (num_read := os.readv(fd, [data[end:].data])):
            end += num_read
        return _parsed(data[:end])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise SnapshotDamagedError(f"{path}: {error}") from error
    except (OSError, MemoryError) as error:
        raise StoreError(f"{path}: cannot be read now: {error}") from error
    finally:
        os.close(fd)


def _parsed(data: np.ndarray) -> Snapshot:
    prefix, rest = data[:_PREFIX_BYTES].tobytes(), data[_PREFIX_BYTES:]
    if not prefix.startswith(_MAGIC) or xxhash.xxh3_128_digest(rest.data) != prefix[32:48]:
        raise ValueError("its bytes do not have the digest that was stored with them")
    # A digest is no signature: from here on nothing is believed that is used as a place in memory.
    header_bytes = int.from_bytes(prefix[48:], "little")
    header = json.loads(rest[:header_bytes].tobytes())
    arrays = dict(_arrays(rest, header_bytes, header))
    pack_ids, specs = tuple(header["pack_ids"]), tuple(parse_location(text)[2] for text in header["specs"])
    if not all(map(is_pack_id, [*pack_ids, *header["packs"]])):
        raise ValueError("a pack's name is none")
    _check(arrays, len(pack_ids), specs)
    return Snapshot(
        point=_point(**header["point"]),
        table=EntryTable(
            **arrays,
            pack_ids=pack_ids,
            spec_list=specs,
            first_words=np.ascontiguousarray(arrays["keys"][:, 0]),
        ),
        packs={pack: PackSize.from_text(text) for pack, text in header["packs"].items()},
        markers={_text(key): _text(reason) for key, reason in header["markers"].items()},
    )


def _arrays(data: np.ndarray, start: int, header: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    for name in _ARRAYS:
        dtype, width = COLUMNS.get(name, (OFFSET, 1))
        num_rows = _count(header["num_offsets" if name == "offsets" else "num_entries"])
        end = start + num_rows * width * dtype.itemsize
        array = data[start:end].view(dtype)
        if len(array) != num_rows * width:
            raise ValueError(f"{name} is cut short")
        yield name, array.reshape(num_rows, width) if width > 1 else array
        start = end + -end % _ALIGNMENT
    if start != len(data):
        raise ValueError(f"it has {len(data):,} bytes, its header speaks of {start:,}")


def _check(arrays: dict[str, np.ndarray], num_packs: int, specs: tuple[Spec, ...]) -> None:
    if not len(arrays["keys"]):
        return
    if arrays["packs"].max() >= num_packs or arrays["specs"].max() >= len(specs):
        raise ValueError("an entry names a pack or a spec that is not listed")
    starts, offsets = arrays["starts"], arrays["offsets"]
    ends = num_offsets(arrays["specs"], specs) + starts
    if starts.min() < 0 or starts.max() > len(offsets) or ends.max() > len(offsets) or offsets.min() < 0:
        raise ValueError("an entry's offsets are not there, or negative")
    if not ascends(arrays["keys"]):
        raise ValueError("its keys are not in order")


def _point(history: object, last_row: object, last_digest: object, num_rows: object) -> Point:
    return Point(_text(history), _count(last_row), _text(last_digest), _count(num_rows))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"not text: {value!r:.50}")
    return value


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"not a number of values: {value!r:.50}")
    return value
