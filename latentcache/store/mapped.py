"""Entries that are read through the page cache: mapped packs, verified once, and advice about what is read soon."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import numpy as np

from latentcache.errors import PackError, StoreError, UnsafeStoreError
from latentcache.store.base import MANY_KEYS, EntryArrays
from latentcache.store.layout import Location, Pack
from latentcache.store.pack import arrays_in, map_pack, verified_arrays
from latentcache.utils.durable_files import open_regular, unreadable

PathOf = Callable[[str], Path]
"""Gives the file of a pack, by its id."""

Relocate = Callable[[str, Location, str], Location]
"""Is given an entry that is not what was stored, and why. It returns where the entry lies now, or raises."""


class Verified:
    """The entries that were found good: a flag a row, by pack. `note_use` is called with each pack that is begun."""

    def __init__(self, note_use: Callable[[str], None]) -> None:
        self.flags: dict[str, np.ndarray] = {}
        self._note_use = note_use

    def has(self, location: Location) -> bool:
        """Whether the entry was found good."""
        flags = self.flags.get(location.pack.id)
        return flags is not None and bool(flags[location.row])

    def of(self, pack: Pack) -> np.ndarray:
        """The flags of a pack: bool [n]. Set one for an entry that was found good."""
        flags = self.flags.get(pack.id)
        if flags is None:
            self._note_use(pack.id)
            flags = self.flags.setdefault(pack.id, np.zeros(pack.num_entries, bool))
        return flags

    def drop(self, locations: Iterable[Location]) -> None:
        """These entries must be verified again."""
        for location in locations:
            if location.pack.id in self.flags:
                self.flags[location.pack.id][location.row] = False

    def release(self, packs: Iterable[str]) -> None:
        """Forget packs."""
        for pack in packs:
            self.flags.pop(pack, None)


MAX_IDLE_READS = 12
"""After so many checks in which nothing came from the disk, nothing is advised. A batch takes one to three."""
SKIPPED_READS = 7
"""After a check that found nothing, so many reads are not checked: in a small batch a check takes a hundredth."""

CAN_ADVISE = hasattr(os, "posix_fadvise") and hasattr(resource, "RUSAGE_THREAD")
"""Only Linux counts what each thread reads from the disk: elsewhere nothing is advised."""

_MAX_FILES = 64  # open at once


class _ThreadCounters(threading.local):
    """What a thread's reads have caused."""

    skip = 0
    """Reads that need no check."""
    idle_reads = 0
    """Checks in turn that found nothing from the disk."""
    blocks_read: int | None = None
    """The system's counter at the last check."""


class ReadAhead:
    """Whether the calling thread should advise the system. Each thread decides for itself.

    Advice about bytes that are in memory already takes more than half of a copy. So it is given while pages are
    missing: at a thread's first read, and until MAX_IDLE_READS checks in turn have found nothing from the disk. Bytes
    that the thread's own advice brought count too, so it goes on as long as it helps. Then every eighth read is
    checked. Where the system does not count per thread (only Linux does), nothing is advised: the warm case matters
    more.
    """

    def __init__(self) -> None:
        self._thread = _ThreadCounters()

    def should_prefetch(self) -> bool:
        """Whether to advise now. It checks what the thread's reads before this one have caused."""
        thread = self._thread
        if thread.skip:
            thread.skip -= 1
            return False
        if not CAN_ADVISE:
            return False
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        # Faults in mapped pages, and blocks that were read because of advice.
        blocks_read = usage.ru_majflt + usage.ru_inblock
        thread.idle_reads = thread.idle_reads + 1 if blocks_read == thread.blocks_read else 0
        thread.blocks_read = blocks_read
        if thread.idle_reads < MAX_IDLE_READS:
            return True
        thread.skip = SKIPPED_READS
        return False


class MappedReader(ReadAhead):
    """Reads entries whose locations are known from mapped packs, and verifies each when it is first read.

    Any thread may use it.
    """

    def __init__(self, path_of: PathOf, relocate: Relocate, note_use: Callable[[str], None]):
        super().__init__()
        self._path_of = path_of
        self._relocate = relocate
        self._maps: dict[str, np.ndarray] = {}
        self.note_use = note_use
        self._verified = Verified(note_use)

    def rows(self, keys: Sequence[str], locations: Sequence[Location]) -> list[EntryArrays]:
        """The verified arrays of each entry. StoreError: they cannot be read now. Errors of `Relocate`."""
        if self.should_prefetch():
            self.prefetch(keys, locations)
        rows, whole = [], dict[str, tuple[np.ndarray | None, np.ndarray]]()
        for key, location in zip(keys, locations, strict=True):
            pack, row = location.pack, location.row
            flags, data = self._verified.flags.get(pack.id), self._maps.get(pack.id)
            try:
                if data is not None and flags is not None and flags[row]:
                    rows.append(arrays_in(data, location))
                    continue
                if pack.id not in whole:
                    # What is found here counts for all of the pack's rows of this call.
                    whole[pack.id] = self._map(pack, pack.file_bytes)[0], self._verified.of(pack)
                data, good = whole[pack.id]  # not from the maps again: another thread may have released the pack
                if data is not None and good[row]:
                    rows.append(arrays_in(data, location))
                    continue
                found = "" if data is None else verified_arrays(data, key, location)
            except ValueError as error:  # a verified entry's bytes have changed
                found = str(error)
            if isinstance(found, str):
                found = self.verify(key, location)  # this finds out what is wrong with the entry, or where it is now
            else:
                good[row] = True
            rows.append(found)
        return rows

    def note_good(self, pack: Pack) -> None:
        """All entries of a pack were found good."""
        self._verified.of(pack)[:] = True

    def verify(self, key: str, location: Location) -> EntryArrays:
        """The entry's arrays, mapped and compared with its digest, where they lie now."""
        while True:
            data, problem = self._map(location.pack, location.end)
            if data is not None:
                found = verified_arrays(data, key, location)
                if not isinstance(found, str):
                    self._verified.of(location.pack)[location.row] = True
                    return found
                problem = found
            location = self._relocate(key, location, problem)

    def _map(self, pack: Pack, end: int) -> tuple[np.ndarray | None, str]:
        """The mapped pack, if its file has its first `end` bytes now, or why not: it is gone, or not what was written.

        A plain StoreError: it cannot be read now, which says nothing about its bytes.
        """
        path = self._path_of(pack.id)
        data = self._maps.get(pack.id)
        try:
            if data is None:
                data = self._maps.setdefault(pack.id, map_pack(path, end, pack.file_bytes))
            elif min(data.size, path.stat().st_size) < end:
                # Touching mapped bytes that a truncation took away would kill the process.
                return None, f"its pack was cut short: {path}"
        except FileNotFoundError:
            # A mapped file stays readable after its name is gone.
            return (data if data is not None and data.size >= end else None), f"its pack is gone: {path}"
        except (PackError, UnsafeStoreError) as error:
            return None, str(error)
        except OSError as error:
            raise unreadable(path, error) from error
        return data, ""

    def prefetch(self, keys: Sequence[str], locations: Sequence[Location]) -> None:
        """Ask the system to bring these entries into memory, since they are read soon. It waits for nothing."""
        # In the order in which they are read: the first can be used while the others are on their way.
        if is_many := len(locations) >= MANY_KEYS:  # of whole packs, which are read faster in their own order
            locations = sorted(locations, key=attrgetter("place"))
        for start in range(0, len(locations), _MAX_FILES):
            with ExitStack() as files:
                # A batch goes to and fro between packs, and on a network file system opening a file takes a request.
                opened = cache(partial(self._opened, files))
                for pack, together in groupby(locations[start : start + _MAX_FILES], key=attrgetter("pack.id")):
                    fd = opened(pack)
                    if fd is not None:
                        ranges = [part for location in together for part in location.ranges()]
                        advise(fd, joined(ranges) if is_many else ranges)

    def _opened(self, files: ExitStack, pack: str) -> int | None:
        """The pack's file, which `files` closes. None where it cannot be opened: the read that follows says why."""
        try:
            fd = open_regular(self._path_of(pack))
        except (OSError, StoreError):
            return None
        files.callback(os.close, fd)
        return fd

    def invalidate(self, locations: Iterable[Location]) -> None:
        """Verify these entries again before they are read: they may not be what was stored."""
        self._verified.drop(locations)

    def release(self, packs: Iterable[str]) -> None:
        """Release what is kept of packs that were compacted away."""
        gone = list(packs)
        self._verified.release(gone)
        for pack in gone:
            self._maps.pop(pack, None)

    def close(self) -> None:
        """Release all."""
        self._verified.flags.clear()
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


def advise(fd: int, ranges: Iterable[tuple[int, int]]) -> None:
    """Ask the system to bring ranges of a file (offset, number of bytes) into memory, and wait for nothing.

    A file whose file system takes no such advice is passed over.
    """
    with suppress(OSError):
        for offset, num_bytes in ranges:
            os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_WILLNEED)
