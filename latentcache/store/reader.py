"""PackReader: entries that are read from mapped packs on this disk, and verified once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from latentcache.errors import EntryDamagedError, EntryMissingError, PackError, StoreError
from latentcache.store.base import Store, StoreStats
from latentcache.store.entry import Description, EntryArrays
from latentcache.store.layout import Location, Pack
from latentcache.store.pack import DISAGREE, WholePack, arrays_in, map_pack, verified_arrays
from latentcache.store.table import LocationTable
from latentcache.types import Entry, Record
from latentcache.utils.durable_files import open_to_read, unreadable

_MAX_RECORDS = 8  # packs whose records are kept open
_MAX_ADVISED = 32  # packs that are not asked for again, of 2 GB: more than are read at once, and less than memory has


class _Mapping(NamedTuple):
    """The file of a pack, its number and size, its bytes, and which of its entries were found good: a flag a row."""

    path: Path
    file: tuple[int, int]
    data: np.ndarray
    good: np.ndarray


class PackReader(Store):
    """A store whose entries lie in packs on this disk, or come there when they are read. Any thread may use it.

        keys -> look_up (which pack, which row) -> path_of (the pack's file here) -> mapped bytes -> arrays

    A pack is mapped when it is first read. An entry is compared with its digest when it is first read; what does not
    fit is given to `relocate`.
    """

    def __init__(self, name: str) -> None:
        """`name` is what errors call it."""
        self._name, self._is_closed = name, False
        self._maps: dict[str, _Mapping] = {}
        self._whole_pack = lru_cache(_MAX_RECORDS)(WholePack.in_file)
        # No bytes: to the end. Each batch of a pack asks for it.
        self._advise_whole = lru_cache(_MAX_ADVISED)(lambda pack: self._advise_ranges(pack, [(0, 0)]))

    @property
    def table(self) -> LocationTable:
        """Where entries are, and why others are damaged, as far as memory knows. StoreError: the store is closed."""
        raise NotImplementedError

    def current(self) -> AbstractContextManager[LocationTable]:
        """The table, as the index is now. It does not change while the block runs."""
        raise NotImplementedError

    def pack_sizes(self) -> Mapping[str, int]:
        """Bytes of the file of each pack that there is, by id."""
        raise NotImplementedError

    def look_up(self, keys: Sequence[str]) -> list[Location | None]:
        """Where the entries lie, None for those that are not there. StoreError for what is no key."""
        raise NotImplementedError

    def path_of(self, pack: str) -> Path:
        """The file of a pack, by its id."""
        raise NotImplementedError

    def relocate(self, key: str, location: Location, problem: str, num_looks: int) -> Location:
        """Where an entry lies now that is not what was stored (`problem`), as this read found `num_looks` times.

        EntryMissingError, EntryDamagedError.
        """
        raise NotImplementedError

    def bring(self, packs: set[str]) -> None:
        """Bring the files of these packs to this disk, if they are elsewhere, and note that they are used."""
        raise NotImplementedError

    # Looking up

    def locate(self, keys: Sequence[str]) -> list[Location]:
        """Where the entries lie. EntryMissingError, EntryDamagedError; StoreError for what is no key."""
        locations = list[Location]()
        for key, location in zip(keys, self.look_up(keys), strict=True):
            if location is None:
                reason = self.table.damaged().get(key)
                raise EntryMissingError(key) if reason is None else self._damaged_error(key, reason)
            locations.append(location)
        return locations

    @override
    def places(self, keys: Sequence[str]) -> tuple[list[str], np.ndarray]:
        with self.current() as table:
            return table.places(keys)

    @override
    def keys(self) -> Iterator[str]:
        with self.current() as table:
            return iter(table.keys())

    @override
    def damaged(self) -> dict[str, str]:
        with self.current() as table:
            return table.damaged()

    @override
    def stats(self) -> StoreStats:
        with self.current() as table:
            counts, sizes = table.counts(), self.pack_sizes()
        return StoreStats(
            num_entries={kind: num for kind, (num, _) in counts.items()},
            num_damaged=len(table.damaged()),
            num_packs=len(sizes),
            payload_bytes=sum(num_bytes for _, num_bytes in counts.values()),
            file_bytes=sum(sizes.values()),
        )

    def _damaged_error(self, key: str, reason: str) -> EntryDamagedError:
        return EntryDamagedError(key, reason, is_marked=not self.read_only)

    # Reading

    @override
    def describe(self, key: str) -> Description:
        group = self.locate([key])[0].group  # which imports no torch; lengths are in the pack alone
        return dict(self.rows([key])[0].description if group.ragged else group.description)

    @override
    def rows(self, keys: Sequence[str]) -> list[EntryArrays]:
        locations = self.locate(keys)
        self.bring({location.pack.id for location in locations})
        maps = [self._maps.get(location.pack.id) for location in locations]
        known = zip(locations, maps, strict=True)
        if unread := [each for each, mapping in known if mapping is None or not mapping.good[each.row]]:
            self._advise(unread)
        return [self._read(key, location) for key, location in zip(keys, locations, strict=True)]

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

    def _read(self, key: str, location: Location) -> EntryArrays:
        """The entry's arrays, mapped, and compared with its digest the first time, where they lie now."""
        num_looks = 0
        while True:
            mapping = self._maps.get(location.pack.id)
            try:
                if mapping is not None and mapping.good[location.row]:
                    return arrays_in(mapping.data, location)
                mapping = self._map(location.pack)
                found = verified_arrays(mapping.data, key, location)
                if not isinstance(found, str):
                    mapping.good[location.row] = True  # of these bytes: another thread may map others
                    return found
                problem = found
            except (PackError, ValueError) as error:
                problem = str(error)
            num_looks += 1
            location = self.relocate(key, location, problem, num_looks)

    def _map(self, pack: Pack) -> _Mapping:
        """The mapped pack, as its file is now. PackError: it is gone, or shorter than it was written.

        A plain StoreError: it cannot be read now, which says nothing about its bytes.
        """
        mapping = self._maps.get(pack.id)
        path = self.path_of(pack.id) if mapping is None else mapping.path
        try:
            status = path.stat()
            file = status.st_ino, status.st_size
            if mapping is None or mapping.file != file:
                # It may be another file now, or cut short: touching bytes that are gone would kill the process.
                data = map_pack(path, pack.file_bytes)
                mapping = self._maps[pack.id] = _Mapping(path, file, data, np.zeros(pack.num_entries, bool))
        except FileNotFoundError as error:
            if mapping is None:  # a mapped file stays readable after its name is gone
                raise PackError(path, "its pack is gone") from error
        except OSError as error:
            raise unreadable(path, error) from error
        return mapping

    def _advise(self, locations: Iterable[Location], *, whole_packs: bool = False) -> None:
        """Ask the system to bring these entries into memory, since they are read soon. It waits for nothing.

        Where a system takes no such advice (macOS, Windows), or a pack cannot be opened, nothing is done: the read
        that follows says why.
        """
        if not hasattr(os, "posix_fadvise"):
            return
        for pack, together in groupby(sorted(locations, key=attrgetter("pack.id")), key=attrgetter("pack.id")):
            if whole_packs:
                self._advise_whole(pack)
            else:
                self._advise_ranges(pack, chain.from_iterable([each.ranges() for each in together]))

    def _advise_ranges(self, pack: str, ranges: Iterable[tuple[int, int]]) -> None:
        with suppress(OSError, StoreError):
            fd = open_to_read(self.path_of(pack))
            try:
                for offset, num_bytes in ranges:
                    os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)

    # What is kept of packs

    def invalidate(self, locations: Iterable[Location]) -> None:
        """Verify these entries again before they are read: they may not be what was stored."""
        for location in locations:
            mapping = self._maps.get(location.pack.id)
            if mapping is not None:
                mapping.good[location.row] = False

    def release(self, packs: Iterable[str]) -> None:
        """Release what is kept of these packs. Arrays that were returned keep their memory."""
        for pack in packs:
            self._maps.pop(pack, None)
        self._whole_pack.cache_clear()

    def close(self) -> None:
        """Release files. What was returned stays readable."""
        self._is_closed = True
        self.release(list(self._maps))

    def check_open(self) -> None:
        """StoreError if it was closed."""
        if self._is_closed:
            raise StoreError(f"{self._name}: the store is closed; open it again")
