"""PackReader: reads entries from memory-mapped packs on this disk and verifies each entry once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from latentcache.errors import EntryDamagedError, EntryMissingError, PackError, StoreError
from latentcache.store.base import Store, StoreStats
from latentcache.store.entry import Description, EntryArrays
from latentcache.store.layout import Location, Pack, byte_ranges
from latentcache.store.pack import DISAGREE, WholePack, arrays_in, map_pack
from latentcache.store.table import LocationTable
from latentcache.types import Entry, Record
from latentcache.utils.durable_files import open_to_read, unreadable

_MAX_RECORDS = 8  # packs whose records stay open
_MAX_ADVISED = 32  # packs not prefetched again, 2 GB of them: more than are read at once, less than memory holds
_pack_id = attrgetter("pack.id")


class _Mapping(NamedTuple):
    """A mapped pack: its path, inode and size, its bytes, and a flag per row that is set once the row is verified."""

    path: Path
    file: tuple[int, int]
    data: np.ndarray
    good: bytearray


class PackReader(Store):
    """A store whose entries lie in packs on this disk, or are fetched to it on demand. It is thread-safe.

        keys -> look_up (which pack, which row) -> path_of (the pack's file here) -> mapped bytes -> arrays

    A pack is mapped on its first read. An entry is compared with its digest on its first read; `relocate` handles a
    mismatch.
    """

    def __init__(self, name: str) -> None:
        """`name` identifies the store in errors."""
        self._name, self._is_closed = name, False
        self._maps: dict[str, _Mapping] = {}
        self._whole_pack = lru_cache(_MAX_RECORDS)(WholePack.in_file)
        # Every batch requests its packs again. A length of 0 means up to the end.
        self._advise_whole = lru_cache(_MAX_ADVISED)(lambda pack: self._advise_ranges(pack, [(0, 0)]))

    @property
    def table(self) -> LocationTable:
        """Known locations and damage reasons, without a look at the index. StoreError if the store is closed."""
        raise NotImplementedError

    def current(self) -> AbstractContextManager[LocationTable]:
        """The table, in sync with the index. It does not change inside the block."""
        raise NotImplementedError

    def pack_sizes(self) -> Mapping[str, int]:
        """File size of each existing pack, by id."""
        raise NotImplementedError

    def look_up(self, keys: Sequence[str]) -> list[Location | None]:
        """The location of each entry, None if it is missing. StoreError for an invalid key."""
        raise NotImplementedError

    def path_of(self, pack: str) -> Path:
        """The file of the pack with this id."""
        raise NotImplementedError

    def relocate(self, key: str, location: Location, problem: str, num_looks: int) -> Location:
        """The new location of an entry whose bytes were wrong (`problem`) in `num_looks` attempts of this read.

        EntryMissingError, EntryDamagedError.
        """
        raise NotImplementedError

    def bring(self, packs: set[str]) -> None:
        """Fetch the files of these packs to this disk if they are remote, and record that the packs are used."""
        raise NotImplementedError

    # Looking up

    def locate(self, keys: Sequence[str]) -> list[Location]:
        """The location of each entry. EntryMissingError, EntryDamagedError; StoreError for an invalid key."""
        locations = list[Location]()
        for key, location in zip(keys, self.look_up(keys), strict=True):
            if location is None:
                reason = self.table.damaged().get(key)
                raise EntryMissingError(key) if reason is None else self._damaged_error(key, reason)
            locations.append(location)
        return locations

    @override
    def places(self, keys: np.ndarray) -> tuple[list[str], np.ndarray]:
        with self.current() as table:
            return table.places(keys)

    @override
    def keys(self) -> Iterator[str]:
        with self.current() as table:
            return table.keys()

    @override
    def damaged(self) -> dict[str, str]:
        with self.current() as table:
            return table.damaged()

    @override
    def stats(self) -> StoreStats:
        with self.current() as table:
            groups, sizes, num_entries = [*table.live_groups()], self.pack_sizes(), Counter[str]()
        for _, num, group in groups:
            num_entries[group.kind] += num
        return StoreStats(
            num_entries=dict(num_entries),
            num_damaged=len(table.damaged()),
            num_packs=len(sizes),
            payload_bytes=sum(group.bytes_of(num) for _, num, group in groups),
            file_bytes=sum(sizes.values()),
        )

    def _damaged_error(self, key: str, reason: str) -> EntryDamagedError:
        return EntryDamagedError(key, reason, is_marked=not self.read_only)

    # Reading

    @override
    def describe(self, key: str) -> Description:
        group = self.locate([key])[0].group  # imports no torch; only the pack knows the lengths of ragged fields
        return dict(self.rows([key])[0].description if group.ragged else group.description)

    @override
    def rows(self, keys: Sequence[str]) -> list[EntryArrays]:
        locations = self.locate(keys)
        packs = {location.pack.id for location in locations}
        self.bring(packs)
        maps = {pack: self._maps.get(pack) for pack in packs}
        unread = [each for each in locations if (found := maps[each.pack.id]) is None or not found.good[each.row]]
        if unread:
            self._advise(unread)
            for pack in {each.pack.id: each.pack for each in unread}.values():
                maps[pack.id] = None
                with suppress(PackError):  # `_read_again` meets it again
                    maps[pack.id] = self._map(pack)
        rows = list[EntryArrays]()
        for key, location in zip(keys, locations, strict=True):
            mapping, row = maps[location.pack.id], location.row
            values: EntryArrays | str = ""
            if mapping is not None:
                is_unread = not mapping.good[row]
                values = arrays_in(mapping.data, key, location, verify=is_unread)
                mapping.good[row] |= is_unread and not isinstance(values, str)
            rows.append(self._read_again(key, location) if isinstance(values, str) else values)
        return rows

    @override
    def get(self, key: str) -> Entry:
        from latentcache.store.batch import own_tensors  # imports torch

        [location], record, [values] = self.locate([key]), self.record(key), self.rows([key])
        return own_tensors(record, values, location.group.ragged)

    @override
    def record(self, key: str) -> Record:
        [location], num_looks = self.locate([key]), 0
        while True:
            problem = DISAGREE
            try:
                whole = self._whole_pack(self.path_of(location.pack.id))
                if whole.is_at(key, location):
                    return whole.record(location.row)
            except FileNotFoundError as error:
                problem = f"its pack is gone: {error}"
            except (PackError, ValueError) as error:
                problem = f"its records cannot be read: {error}"
            num_looks += 1
            location = self.relocate(key, location, problem, num_looks)

    @override
    def prefetch(self, keys: Iterable[str], *, whole_packs: bool = False) -> None:
        found = self.table.look_up(list(dict.fromkeys(keys)))
        self._advise([location for location in found if location is not None], whole_packs=whole_packs)

    def _read_again(self, key: str, location: Location) -> EntryArrays:
        """An entry that could not be read: mapped and verified again, then wherever it has moved."""
        num_looks = 0
        while True:
            try:
                mapping = self._map(location.pack)
                found = arrays_in(mapping.data, key, location)
                if not isinstance(found, str):
                    mapping.good[location.row] = True  # in this mapping: another thread may have mapped another file
                    return found
                problem = found
            except PackError as error:
                problem = str(error)
            num_looks += 1
            location = self.relocate(key, location, problem, num_looks)

    def _map(self, pack: Pack) -> _Mapping:
        """Map the pack's current file. PackError if it is missing, or shorter than it was written.

        A plain StoreError means that it cannot be read now; it says nothing about the bytes.
        """
        mapping = self._maps.get(pack.id)
        path = self.path_of(pack.id) if mapping is None else mapping.path
        try:
            status = path.stat()
            file = status.st_ino, status.st_size
            if mapping is None or mapping.file != file:
                # The file may have been replaced or truncated: touching missing bytes would kill the process.
                data = map_pack(path, pack.file_bytes)
                mapping = self._maps[pack.id] = _Mapping(path, file, data, bytearray(pack.num_entries))
        except FileNotFoundError as error:
            if mapping is None:  # a mapped file stays readable after it was unlinked
                raise PackError(path, "its pack is gone") from error
        except OSError as error:
            raise unreadable(path, error) from error
        return mapping

    def _advise(self, locations: Iterable[Location], *, whole_packs: bool = False) -> None:
        """Ask the system to load these entries into the page cache, without waiting.

        A no-op if the system takes no such advice (macOS, Windows) or a pack cannot be opened: the read that follows
        reports the reason.
        """
        if not hasattr(os, "posix_fadvise"):
            return
        for pack, together in groupby(sorted(locations, key=_pack_id), key=_pack_id):
            if whole_packs:
                self._advise_whole(pack)
            else:
                self._advise_ranges(pack, byte_ranges(together))

    def _advise_ranges(self, pack: str, ranges: Iterable[tuple[int, int]]) -> None:
        with suppress(OSError, StoreError):
            fd = open_to_read(self.path_of(pack))
            try:
                for offset, num_bytes in ranges:
                    os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)

    # Releasing

    def invalidate(self, locations: Iterable[Location]) -> None:
        """Verify these entries again on their next read: their bytes may have changed."""
        for location in locations:
            mapping = self._maps.get(location.pack.id)
            if mapping is not None:
                mapping.good[location.row] = False

    def release(self, packs: Iterable[str]) -> None:
        """Drop the mappings of these packs. Arrays that were returned keep their memory alive."""
        for pack in packs:
            self._maps.pop(pack, None)
        self._whole_pack.cache_clear()

    def close(self) -> None:
        """Release all files. Arrays that were returned stay readable."""
        self._is_closed = True
        self.release(list(self._maps))

    def check_open(self) -> None:
        """StoreError if the store was closed."""
        if self._is_closed:
            raise StoreError(f"{self._name}: the store is closed; open it again")
