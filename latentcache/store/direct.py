"""Entries read past the page cache: for packs that memory cannot hold.

The page cache would make room for each page, only to drop it before it is asked for again. That takes a processor as
long as the disk takes to read it (docs/benchmarks/retrieve.md).
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from typing_extensions import override

from latentcache.errors import StoreError
from latentcache.store.base import EntryArrays, payload_digest
from latentcache.store.direct_reads import DirectReads, Read
from latentcache.store.layout import Location, Pack
from latentcache.store.mapped import MappedReader, PathOf, Reader, Verified
from latentcache.utils.host_memory import host_memory

Io = Literal["auto", "mapped", "direct"]
"""How packs are read. `mapped`: through the page cache, which keeps what was read. `direct`: past it. `auto`: direct
where the packs take more than MEMORY_SHARE of the memory and the system can do it, else mapped."""
IO: tuple[Io, ...] = get_args(Io)

MEMORY_SHARE = 0.5
"""Of a machine's memory. The rest is for the training."""

logger = logging.getLogger("latentcache")


class _Thread(threading.local):
    """Each thread's own reads. A fork's child has none: its parent's queue is not its own."""

    pid = -1
    reads: DirectReads | None = None


class DirectReader(Reader):
    """A `Reader` past the page cache: each thread has its own `DirectReads`. No descriptor stays open.

    `mapped` reads what does not come so: an entry whose file is gone or damaged, ragged entries, and all entries for a
    thread for which the system has no queue. With `required` that is a StoreError. `is_supported` until the system
    said that it has no queue for any thread.
    """

    keeps_rows = False

    def __init__(self, path_of: PathOf, mapped: MappedReader, *, required: bool):
        self._path_of = path_of
        self._mapped = mapped
        self._required = required
        self.is_supported = True
        self._thread = _Thread()
        # Its own: what the page cache has of an entry may be better than what the disk gives.
        self._verified = Verified(mapped.note_use)

    @override
    def rows(self, keys: Sequence[str], locations: Sequence[Location]) -> list[EntryArrays]:
        reads = self.for_thread()
        if reads is None or any(location.group.ragged for location in locations):
            return self._mapped.rows(keys, locations)
        begun = reads.begin(dict(zip(keys, locations, strict=True)))
        arrays = {key: self._finished(key, read, reads) for key, read in begun.items()}
        return [arrays[key] for key in keys]

    def _finished(self, key: str, read: Read, reads: DirectReads) -> EntryArrays:
        if reads.wait(read):
            found, place = read.arrays(), read.location
            if self._verified.has(place):
                return found
            if payload_digest(key, found.description, found.arrays) == place.digest:
                self._verified.of(place.pack)[place.row] = True
                return found
        # This finds out what is wrong with the entry, or where it is now.
        return self._mapped.verify(key, read.location)

    @override
    def should_prefetch(self) -> bool:
        return True

    @override
    def prefetch(self, keys: Sequence[str], locations: Sequence[Location]) -> None:
        reads = self.for_thread()
        if reads is None:
            self._mapped.prefetch(keys, locations)
        else:
            places = zip(keys, locations, strict=True)
            reads.prefetch({key: location for key, location in places if not location.group.ragged})

    @override
    def invalidate(self, locations: Iterable[Location]) -> None:
        locations = list(locations)
        self._verified.drop(locations)
        self._mapped.invalidate(locations)

    @override
    def release(self, packs: Iterable[str]) -> None:
        packs = list(packs)
        self._verified.release(packs)
        self._mapped.release(packs)

    def for_thread(self) -> DirectReads | None:
        """The reads of the calling thread, or None where the system has no queue for it."""
        thread = self._thread
        if thread.pid == os.getpid() and thread.reads is not None and thread.reads.is_broken:
            thread.pid = -1
            thread.reads.close()
        if thread.pid != os.getpid():
            thread.reads = None
            try:
                thread.reads = DirectReads(self._path_of)
            except OSError as error:
                self._refused(error)
            thread.pid = os.getpid()
        return thread.reads

    def _refused(self, error: OSError) -> None:
        self.is_supported = self.is_supported and error.errno == errno.EAGAIN
        message = (
            f"this thread cannot read past the page cache: {error}. With EAGAIN, raise fs.aio-max-nr or read in fewer "
            "threads"
        )
        if self._required:
            raise StoreError(f"{message}; or open the cache with io='mapped'") from error
        logger.warning("%s. It reads through the page cache.", message)

    def close(self) -> None:
        """End the calling thread's reads. Those of others end with their threads, or with this."""
        if self._thread.reads is not None and self._thread.pid == os.getpid():
            self._thread.reads.close()
        self._thread.reads = None
        self._verified.flags.clear()
        self._mapped.close()


def choose_reader(io: Io, packs: Iterable[Pack], path_of: PathOf, mapped: MappedReader) -> Reader | None:
    """How these packs are read: past the page cache if `io` and the system say so, else mapped. None: not known yet.

    StoreError if `io` is "direct" and the file system cannot do it.
    """
    packs = list(packs)
    if io == "mapped":
        return mapped
    if not packs:
        return None
    if io == "auto" and sum(pack.file_bytes for pack in packs) <= MEMORY_SHARE * host_memory():
        return mapped
    direct = DirectReader(path_of, mapped, required=io == "direct")
    reads = direct.for_thread()
    if reads is None:
        return None if direct.is_supported else mapped
    for path in [path_of(pack.id) for pack in packs]:
        try:
            reason = reads.refusal(path)
        except (OSError, StoreError):
            continue  # what is wrong with it is reported when an entry of it is read
        if reason is None:
            return direct
        if io == "direct":
            raise StoreError(f"{path}: cannot be read past the page cache: {reason}. Open it with io='mapped'.")
        logger.info("%s: packs are read through the page cache: %s", path, reason)
        return mapped
    return None
