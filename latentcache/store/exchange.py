"""Packs that come from elsewhere, which are checked whole, and copies of a part of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from latentcache.errors import PackError
from latentcache.store.disk import DiskStore
from latentcache.store.layout import PackRow
from latentcache.store.pack import (
    PackRecords,
    check_ragged,
    map_open_pack,
    new_pack_id,
    pack_buffers,
    read_entry,
    read_open_records,
    read_pack_bytes,
    row_problem,
    verified_arrays,
)
from latentcache.utils.durable_files import open_regular, sealed_file, write_all

_WRITE_BYTES = 1 << 20


def take_pack(store: DiskStore, pack: str, chunks: Iterable[bytes | memoryview], num_bytes: int) -> int:
    """Write a pack that came from elsewhere, check it whole, and seal it. Returns how many entries are new.

    `chunks` are its bytes, and `num_bytes` says how many there should be, for the message of StorageFullError. Nothing
    is sealed unless each payload has its digest and each key follows from its record's identity: PackError. An error of
    `chunks` leaves nothing either. ReadOnlyError; StoreBusyError while upkeep works on the cache.
    """
    path = store.directory.new_pack_path(pack)

    def fill(fd: int) -> PackRow:
        for part in _gathered(chunks):
            write_all(fd, part)
        return checked_pack(path, fd).row

    return _take(store, path, num_bytes, fill)


def take_checked(store: DiskStore, records: PackRecords, data: bytes | memoryview) -> int:
    """Write a pack that is in memory, and in which `problems_of` finds nothing, and seal it.

    Returns how many entries are new. Errors as for `take_pack`.
    """

    def fill(fd: int) -> PackRow:
        write_all(fd, data)
        return records.row

    return _take(store, store.directory.new_pack_path(records.row.pack.id), len(data), fill)


def _take(store: DiskStore, path: Path, num_bytes: int, fill: Callable[[int], PackRow]) -> int:
    with ExitStack() as held:
        try:
            with sealed_file(path, num_bytes, is_new=True) as fd:
                row = fill(fd)
                # From here on upkeep must not see a pack that the index does not know.
                held.enter_context(store.lock("taking a pack", shared=True))
        except FileExistsError:  # another one sent it meanwhile: what is there stays
            held.close()
            return take_sealed(store, path.stem)
        return store.catalog.seal(row)


def take_sealed(store: DiskStore, pack: str) -> int:
    """Take in a pack that lies in the cache, and that the index may not know: an error came between the two.

    Returns how many entries are new. Errors as for `take_pack`; FileNotFoundError: there is no such pack.
    """
    store.catalog.reload()
    if pack in store.catalog.table.packs:
        return 0
    path = store.directory.pack_path(pack)
    with store.lock("taking a pack", shared=True):
        fd = open_regular(path)
        try:
            row = checked_pack(path, fd).row
        finally:
            os.close(fd)
        return store.catalog.seal(row)


def _gathered(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Join chunks to larger parts: a service's come in pieces of some KiB, those of an object store in large ones."""
    buffer = bytearray()
    for chunk in chunks:
        if not buffer and len(chunk) >= _WRITE_BYTES:
            yield chunk
            continue
        buffer += chunk
        if len(buffer) >= _WRITE_BYTES:
            yield bytes(buffer)
            buffer.clear()
    yield bytes(buffer)


def checked_pack(path: Path, fd: int) -> PackRecords:
    """The records of an open pack that is to lie at `path`. PackError unless every byte that counts is as it was."""
    records = read_open_records(path, fd)
    data = map_open_pack(path, fd)
    for key, problem in problems_of(records, data):
        raise PackError(path, f"entry {key}: {problem}")
    return records


def problems_of(records: PackRecords, data: np.ndarray) -> Iterator[tuple[str, str]]:
    """The entries of a pack that are not what was stored: key and reason. `data` has the pack's bytes (uint8, flat).

    PackError where entries share values: then reading all takes far longer than the pack's bytes say.
    """
    check_ragged(records.row.pack, data)
    for at, key in enumerate(records.row.names()):
        if (problem := row_problem(records, data, at)) is not None:
            yield key, problem


def part_of(records: PackRecords, data: np.ndarray, keys: Collection[str]) -> tuple[PackRecords, bytes]:
    """A new pack, in memory, of these entries of another one, of which `problems_of` says nothing."""
    names = {key: at for at, key in enumerate(records.row.names()) if key in keys}
    entries = []
    for key, at in names.items():
        location = records.row.location(at)
        found = verified_arrays(data, key, location)
        if isinstance(found, str):
            raise PackError(records.row.pack.id, f"entry {key}: {found}")
        entries.append(read_entry(found, records, location))
    pack = new_pack_id()
    copy = b"".join(pack_buffers(pack, entries)[2])
    return read_pack_bytes(copy, pack), copy
