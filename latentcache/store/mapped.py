"""Entries that are read from mapped packs, verified once, and advice to the system about what is read soon."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from latentcache.errors import PackError, StoreError, UnsafeStoreError
from latentcache.store.base import EntryArrays
from latentcache.store.layout import Location, Pack
from latentcache.store.pack import arrays_in, map_pack, verified_arrays
from latentcache.utils.durable_files import open_regular, unreadable

PathOf = Callable[[str], Path]
"""Gives the file of a pack, by its id."""

Relocate = Callable[[str, Location, str], Location]
"""Is given an entry that is not what was stored, and why. It returns where the entry lies now, or raises."""


class _Mapping(NamedTuple):
    """The bytes of a pack, and which of its entries were found good: a flag a row."""

    data: np.ndarray
    good: np.ndarray


class MappedReader:
    """Reads entries whose locations are known from mapped packs, and verifies each when it is first read.

    `note_use` is called with each pack that is begun. Any thread may use a reader.
    """

    def __init__(self, path_of: PathOf, relocate: Relocate, note_use: Callable[[str], None]):
        self._path_of = path_of
        self._relocate = relocate
        self._note_use = note_use
        self._maps: dict[str, _Mapping] = {}

    def rows(self, keys: Sequence[str], locations: Sequence[Location]) -> list[EntryArrays]:
        """The verified arrays of each entry. StoreError: they cannot be read now. Errors of `Relocate`."""
        known = [self._known(location) for location in locations]
        if unread := [location for location, row in zip(locations, known, strict=True) if row is None]:
            self.prefetch(unread)
        found = zip(keys, locations, known, strict=True)
        return [self.verify(key, location) if row is None else row for key, location, row in found]

    def _known(self, location: Location) -> EntryArrays | None:
        """The arrays of an entry that was found good before."""
        mapping = self._maps.get(location.pack.id)
        if mapping is None or not mapping.good[location.row]:
            return None
        try:
            return arrays_in(mapping.data, location)
        except ValueError:  # its bytes have changed
            return None

    def verify(self, key: str, location: Location) -> EntryArrays:
        """The entry's arrays, mapped and compared with its digest, where they lie now."""
        while True:
            mapping, problem = self._map(location.pack, location.end)
            if mapping is not None:
                found = verified_arrays(mapping.data, key, location)
                if not isinstance(found, str):
                    mapping.good[location.row] = True  # of these bytes: another thread may map others
                    return found
                problem = found
            location = self._relocate(key, location, problem)

    def _map(self, pack: Pack, end: int) -> tuple[_Mapping | None, str]:
        """The mapped pack, if its file has its first `end` bytes now, or why not: it is gone, or not what was written.

        A plain StoreError: it cannot be read now, which says nothing about its bytes.
        """
        path = self._path_of(pack.id)
        mapping = self._maps.get(pack.id)
        try:
            if mapping is None:
                self._note_use(pack.id)
                mapped = _Mapping(map_pack(path, end, pack.file_bytes), np.zeros(pack.num_entries, bool))
                mapping = self._maps.setdefault(pack.id, mapped)
            elif min(mapping.data.size, path.stat().st_size) < end:
                # Touching mapped bytes that a truncation took away would kill the process.
                return None, f"its pack was cut short: {path}"
        except FileNotFoundError:
            # A mapped file stays readable after its name is gone.
            return (mapping if mapping is not None and mapping.data.size >= end else None), f"its pack is gone: {path}"
        except (PackError, UnsafeStoreError) as error:
            return None, str(error)
        except OSError as error:
            raise unreadable(path, error) from error
        return mapping, ""

    def prefetch(self, locations: Iterable[Location]) -> None:
        """Ask the system to bring these entries into memory, since they are read soon. It waits for nothing.

        Where a system takes no such advice (macOS, Windows), or a pack cannot be opened, nothing is done: the read
        that follows says why.
        """
        if not hasattr(os, "posix_fadvise"):
            return
        for pack, together in groupby(sorted(locations, key=attrgetter("place")), key=attrgetter("pack.id")):
            with suppress(OSError, StoreError):
                fd = open_regular(self._path_of(pack))
                try:
                    for offset, num_bytes in joined(part for location in together for part in location.ranges()):
                        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(fd)

    def invalidate(self, locations: Iterable[Location]) -> None:
        """Verify these entries again before they are read: they may not be what was stored."""
        for location in locations:
            mapping = self._maps.get(location.pack.id)
            if mapping is not None:
                mapping.good[location.row] = False

    def packs(self) -> set[str]:
        """The packs that are mapped."""
        return set(self._maps.copy())

    def release(self, packs: Iterable[str]) -> None:
        """Release what is kept of packs that were compacted away."""
        for pack in packs:
            self._maps.pop(pack, None)

    def close(self) -> None:
        """Release all."""
        self._maps.clear()


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges (offset, number of bytes), joined where one begins at the end of another: rows that follow each other."""
    parts: list[list[int]] = []
    by_end: dict[int, list[int]] = {}
    for offset, num_bytes in ranges:
        part = by_end.pop(offset, None)
        if part is None:
            part = [offset, 0]
            parts.append(part)
        part[1] += num_bytes
        by_end[offset + num_bytes] = part
    return [(offset, num_bytes) for offset, num_bytes in parts]
