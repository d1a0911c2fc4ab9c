"""Entries that leave a store as a pack in memory, and packs that come from elsewhere and are checked whole."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.errors import EntryMissingError, PackError, StoreError
from latentcache.identity import canonical_json
from latentcache.store.base import EntryArrays, record_json
from latentcache.store.disk import DiskStore
from latentcache.store.layout import Location, Pack
from latentcache.store.pack import (
    PackRecords,
    map_open_pack,
    map_pack,
    new_pack_id,
    pack_buffers,
    read_open_records,
    read_pack_bytes,
    row_problem,
    verified_arrays,
)
from latentcache.utils.durable_files import open_regular, sealed_file, write_all

_WRITE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry as it lies in its pack: as `OwnedEntry`, but the values are verified views of the store's memory."""

    key: str
    record: bytes
    location: Location
    found: EntryArrays

    @property
    def tensors(self) -> Mapping[str, np.ndarray]:
        """The fields' values. They must not be written to."""
        return {name: array[0] for name, array in zip(self.found.description, self.found.arrays, strict=True)}

    @property
    def num_bytes(self) -> int:
        """Bytes of the values and of the record."""
        return sum(array.nbytes for array in self.found.arrays) + len(self.record)

    def spec(self) -> tuple[Any, ...]:
        """As `OwnedEntry.spec`."""
        ragged, fields = self.location.group.ragged, []
        for name, (dtype, shape) in self.found.description.items():
            fields.append((name, dtype, tuple(shape[1:] if name in ragged else shape), name in ragged))
        return self.location.group.kind, tuple(fields)

    def digest(self) -> bytes:
        """The payload's digest, with which the values were compared."""
        return self.location.digest


class StoredEntries:
    """Reads entries as they are stored, records included, without a copy. Threads may share it.

    The records of packs are mapped and compared with their digest at the first read: none of their bytes is kept.
    """

    def __init__(self, store: DiskStore):
        self._store = store
        self._records: dict[str, PackRecords] = {}
        self._seen = frozenset[str]()

    def read(self, keys: Sequence[str]) -> list[StoredEntry]:
        """The entries, in the order of the keys. EntryMissingError, EntryDamagedError."""
        rows = self._store.rows(keys)
        entries = []
        for key, location, found in zip(keys, self._store.catalog.look_up(keys), rows, strict=True):
            if location is None:
                raise EntryMissingError(key, "it was removed just now")
            entries.append(StoredEntry(key, self._record(key, location), location, found))
        return entries

    def num_bytes(self, keys: Sequence[str]) -> int:
        """About how many bytes the values of these entries have. Those that are not there count nothing."""
        return sum([location.group.mean_bytes for location in self._store.catalog.look_up(keys) if location])

    def release(self) -> set[str]:
        """Release packs that were removed since the last call, by this process or another, and return their ids.

        A mapped file takes space after its name is gone: a process that reads for months calls this now and then.
        """
        self._store.catalog.reload()
        there = frozenset(self._store.catalog.table.packs.copy())
        gone = set(self._seen - there)
        self._seen = there
        self._store.release(gone)
        for pack in gone:
            self._records.pop(pack, None)
        return gone

    def _map(self, pack: Pack) -> PackRecords:
        data = map_pack(self._store.directory.pack_path(pack.id), pack.file_bytes).data
        return self._records.setdefault(pack.id, read_pack_bytes(data, pack.id))

    def _record(self, key: str, location: Location) -> bytes:
        try:
            records = self._records.get(location.pack.id) or self._map(location.pack)
            if records.is_at(key, location):
                return bytes(records.json(location.row))
        except (StoreError, FileNotFoundError):
            pass  # the store says what is wrong with the record, or finds it where it is now
        record = self._store.record(key)
        return record_json(canonical_json(record.identity), canonical_json(record.provenance))


def take_pack(store: DiskStore, pack: str, chunks: Iterable[bytes | memoryview], num_bytes: int) -> int:
    """Write a pack that came from elsewhere, check it whole, and seal it. Returns how many entries are new.

    `chunks` are its bytes, and `num_bytes` says how many there should be, for the message of StorageFullError. Nothing
    is sealed unless each payload has its digest and each key follows from its record's identity: PackError. An error of
    `chunks` leaves nothing either. ReadOnlyError; StoreBusyError while upkeep works on the cache.
    """
    path = store.directory.new_pack_path(pack)
    with ExitStack() as held:
        with sealed_file(path, num_bytes) as fd:
            for part in _gathered(chunks):
                write_all(fd, part)
            row = checked_pack(path, fd).row
            # From here on upkeep must not see a pack that the index does not know.
            held.enter_context(store.lock("taking a pack", shared=True))
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
    """The same bytes in larger parts: a service's come in pieces of some KiB, of an object store in large ones."""
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
    """The entries of a pack that are not what was stored: key and reason. `data` has the pack's bytes (uint8, flat)."""
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
        entries.append(StoredEntry(key, records.json(at), location, found))
    pack = new_pack_id()
    copy = b"".join(pack_buffers(pack, entries)[2])
    return read_pack_bytes(copy, pack), copy


def take_checked(store: DiskStore, records: PackRecords, data: bytes | memoryview) -> int:
    """Write a pack that is in memory, and in which `problems_of` finds nothing, and seal it.

    Returns how many entries are new. As `take_pack`.
    """
    path = store.directory.new_pack_path(records.row.pack.id)
    with ExitStack() as held:
        with sealed_file(path, len(data)) as fd:
            write_all(fd, data)
            # From here on upkeep must not see a pack that the index does not know.
            held.enter_context(store.lock("taking a pack", shared=True))
        return store.catalog.seal(records.row)
