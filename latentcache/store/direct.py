"""Entries read past the page cache: for packs that memory cannot hold.

The page cache would make room for each page, only to drop it before it is asked for again. That takes a processor as
long as the disk takes to read it (docs/benchmarks/retrieve.md).
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from typing_extensions import override

from latentcache.errors import StoreError, UnsafeStoreError
from latentcache.store.aio import Piece, ReadQueue
from latentcache.store.base import ARRAY_DTYPES, EntryArrays, payload_digest
from latentcache.store.layout import Location, Pack
from latentcache.store.mapped import MappedReader, PathOf, Reader, Verified
from latentcache.utils.durable_files import BLOCK_BYTES, open_regular, set_past_cache, unreadable
from latentcache.utils.host_memory import disk_memory, host_memory

Io = Literal["auto", "mapped", "direct"]
"""How packs are read. `mapped`: through the page cache, which keeps what was read. `direct`: past it. `auto`: direct
where the packs take more than MEMORY_SHARE of the memory and the system can do it, else mapped."""
IO: tuple[Io, ...] = get_args(Io)

MEMORY_SHARE = 0.5
"""Of a machine's memory. The rest is for the training."""
DEPTH = 256
"""Fields that are being read at once for a thread. The queues of a machine may have 65,536 together (fs.aio-max-nr)."""
MAX_ASKED_BYTES = 64 << 20
"""What a thread has asked for and not read yet. What is asked for beyond it is read when its turn comes."""
MAX_WAITING_READS = 64
"""What was asked for so many reads ago, and not read, is forgotten."""
_TOGETHER = 8  # entries are begun: the disk is at work while the next ones are opened

SLAB_BYTES = 16 << 20
MAX_IDLE_BYTES = 64 << 20
_GRAIN = 1 << 14  # buffers are multiples of it, so that entries of almost equal size can share them

logger = logging.getLogger("latentcache")


class Slabs:
    """Buffers that start on a page, cut from `disk_memory`. One thread takes them; any thread may drop them.

    A buffer can be taken again when no array shares its memory any more. At most MAX_IDLE_BYTES are kept for that.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[np.ndarray]] = {}
        self._idle_bytes = 0
        self._slab = np.empty(0, np.uint8)
        self._dropped: deque[np.ndarray] = deque()

    def take(self, num_bytes: int) -> np.ndarray:
        """A flat uint8 array of at least so many bytes. OSError, MemoryError if there is no memory."""
        while self._dropped:
            self._keep(self._dropped.popleft())
        num_bytes = -(-num_bytes // _GRAIN) * _GRAIN
        idle = self._idle.get(num_bytes)
        if idle:
            self._idle_bytes -= num_bytes
            buffer = idle.pop()
        else:
            if self._slab.nbytes < num_bytes:
                self._slab = np.frombuffer(disk_memory(max(SLAB_BYTES, num_bytes)), np.uint8)
            buffer, self._slab = self._slab[:num_bytes], self._slab[num_bytes:]
        # All views refer to this array: numpy passes over arrays whose own base is an array, and this one's is not.
        taken = np.frombuffer(buffer.data, np.uint8)
        weakref.finalize(taken, self._dropped.append, buffer).atexit = False
        return taken

    def _keep(self, buffer: np.ndarray) -> None:
        num_bytes = buffer.nbytes
        if num_bytes > MAX_IDLE_BYTES:
            return
        if self._idle_bytes + num_bytes > MAX_IDLE_BYTES:
            same = self._idle.get(num_bytes, [])  # the next entries may have this size: those of others go first
            self._idle, self._idle_bytes = {num_bytes: same}, num_bytes * len(same)
            if self._idle_bytes + num_bytes > MAX_IDLE_BYTES:
                return
        self._idle.setdefault(num_bytes, []).append(buffer)
        self._idle_bytes += num_bytes


class _Blocks(NamedTuple):
    """A field's whole blocks: where they come to lie, the offset in the file, and the bytes that the field needs."""

    array: np.ndarray
    offset: int
    min_bytes: int


@dataclass(slots=True, eq=False)
class Read:
    """One entry on its way: its fields come to lie in `data`, at `offsets`, by whole `blocks`."""

    location: Location
    path: Path
    data: np.ndarray
    offsets: list[int]
    blocks: list[_Blocks]
    begun: int
    """The number of the thread's read in which it was begun."""
    num_left: int = 0
    """Fields that are under way."""
    is_complete: bool = True
    error: StoreError | None = None

    def fail(self, error: OSError) -> None:
        """It cannot be read now, for this reason. `DirectReads.wait` raises it."""
        self.error = unreadable(self.path, error)
        self.error.__cause__ = error

    def arrays(self) -> EntryArrays:
        """The entry's arrays, when it came whole."""
        columns = zip(self.location.group.columns, self.offsets, strict=True)
        arrays = [np.ndarray((1, *c.shape), ARRAY_DTYPES[c.dtype], self.data, offset) for c, offset in columns]
        return EntryArrays(self.location.group.description, tuple(arrays))


class DirectReads:
    """One thread's reads. OSError as for `ReadQueue`.

    `is_broken` after what is no StoreError, as Ctrl-C: what is counted here may not be what the kernel does.
    """

    is_broken = False

    def __init__(self, path_of: PathOf):
        self._path_of = path_of
        self._queue = ReadQueue(DEPTH)
        self._slabs = Slabs()
        self._asked: dict[str, Read] = {}
        self._asked_bytes = 0
        self._num_reads = 0
        # By tag, with the bytes that must come. They keep the memory that is read into alive.
        self._under_way: dict[int, tuple[Read, int]] = {}
        self._num_tags = 0

    def prefetch(self, places: Mapping[str, Location]) -> None:
        """Begin to read these entries, which `begin` returns later. It waits for nothing."""
        with self._unbroken():
            self._reap(0)
            self._forget_waiting()
            new: dict[str, Read] = {}
            room, num_bytes = self._queue.room, self._asked_bytes
            for key, location in places.items():
                if key in self._asked:
                    continue
                room -= len(location.group.columns)
                if room < 0 or num_bytes >= MAX_ASKED_BYTES:
                    break
                try:
                    new[key] = self._made(location)
                except StoreError:
                    break  # it comes up again when the entry is read
                num_bytes += new[key].data.nbytes
            self._begin(new.values())
            self._asked |= new
            self._asked_bytes = num_bytes

    def begin(self, places: Mapping[str, Location]) -> dict[str, Read]:
        """The reads of these entries, in order. `wait` for each. Their memory lives as long as arrays refer to it."""
        with self._unbroken():
            self._num_reads += 1
            reads: dict[str, Read] = {}
            new: list[Read] = []
            for key, location in places.items():
                read = self._take(key)
                if read is None or read.location.place != location.place or read.error is not None:
                    read = self._made(location)
                    new.append(read)
                reads[key] = read
            self._begin(new)
        return reads

    def wait(self, read: Read) -> bool:
        """Whether the entry came whole: False where its file is gone, or none to be read so, or ends too early.

        StoreError: it cannot be read now.
        """
        if read.num_left:
            with self._unbroken():
                while read.num_left:
                    self._reap(1)
        if read.error is not None:
            raise read.error
        return read.is_complete

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except BaseException:
            self.is_broken = True
            raise

    def refusal(self, path: Path) -> str | None:
        """Why this file cannot be read past the page cache, or None. To be asked before anything is begun.

        StoreError, FileNotFoundError as for `open_regular`; OSError if there is no memory.
        """
        assert not self._under_way
        buffer = self._slabs.take(BLOCK_BYTES)
        fd = open_regular(path)
        try:
            if not set_past_cache(fd, True):
                return "its file system cannot do it"
            with self._unbroken():
                self._queue.submit([Piece(0, fd, buffer.ctypes.data, BLOCK_BYTES, 0)])
                ((_, result),) = self._queue.reap(1)
        except OSError as error:
            return str(error)
        finally:
            os.close(fd)
        return None if result >= 0 else os.strerror(-result)

    def close(self) -> None:
        """Wait for what is under way, and begin nothing any more."""
        self._queue.close()

    def _take(self, key: str) -> Read | None:
        read = self._asked.pop(key, None)
        if read is not None:
            self._asked_bytes -= read.data.nbytes
        return read

    def _forget_waiting(self) -> None:
        """Forget what was asked for long ago. It is the first in order."""
        while self._asked:
            key, read = next(iter(self._asked.items()))
            if self._num_reads - read.begun < MAX_WAITING_READS:
                return
            self._take(key)

    def _made(self, location: Location) -> Read:
        windows, offsets, at = [], [], 0
        for offset, num_bytes in location.ranges():
            first = offset // BLOCK_BYTES * BLOCK_BYTES
            end = at + -(-(offset + num_bytes - first) // BLOCK_BYTES) * BLOCK_BYTES
            windows.append((at, end, first, offset + num_bytes - first))
            offsets.append(at + offset - first)
            at = end
        path = self._path_of(location.pack.id)
        try:
            data = self._slabs.take(at)
        except (OSError, MemoryError) as error:
            raise unreadable(path, error) from error
        blocks = [_Blocks(data[start:end], first, min_bytes) for start, end, first, min_bytes in windows]
        return Read(location, path, data, offsets, blocks, self._num_reads)

    def _begin(self, reads: Iterable[Read]) -> None:
        rest = iter(reads)
        while group := list(islice(rest, _TOGETHER)):
            files: list[int] = []
            pieces: list[Piece] = []
            try:
                for read in group:
                    fd = _opened(read)
                    if fd is None:
                        continue
                    files.append(fd)
                    read.num_left = len(read.blocks)
                    for array, offset, min_bytes in read.blocks:
                        self._num_tags += 1
                        self._under_way[self._num_tags] = read, min_bytes
                        pieces.append(Piece(self._num_tags, fd, array.ctypes.data, array.nbytes, offset))
                self._submit(pieces)
            finally:
                for fd in files:
                    os.close(fd)  # the kernel keeps what it still reads

    def _submit(self, pieces: Sequence[Piece]) -> None:
        while pieces:
            if not self._queue.room:
                self._reap(1)
            now, pieces = pieces[: self._queue.room], pieces[self._queue.room :]
            before = self._queue.num_under_way
            try:
                self._queue.submit(now)
            except OSError as error:
                for piece in now[self._queue.num_under_way - before :]:
                    self._end(piece.tag).fail(error)

    def _reap(self, at_least: int) -> None:
        for tag, result in self._queue.reap(at_least):
            min_bytes = self._under_way[tag][1]
            read = self._end(tag)
            if result < 0:
                read.fail(OSError(-result, os.strerror(-result)))
            elif result < min_bytes:
                read.is_complete = False

    def _end(self, tag: int) -> Read:
        read, _ = self._under_way.pop(tag)
        read.num_left -= 1
        return read


def _opened(read: Read) -> int | None:
    try:
        fd = open_regular(read.path)
        if set_past_cache(fd, True):
            return fd
        os.close(fd)
        read.is_complete = False
    except (FileNotFoundError, UnsafeStoreError):
        read.is_complete = False
    except StoreError as error:
        read.error = error
    return None


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
