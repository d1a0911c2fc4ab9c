"""What one thread reads past the page cache, and the memory that it comes to lie in."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from latentcache.errors import StoreError, UnsafeStoreError
from latentcache.store.aio import Piece, ReadQueue
from latentcache.store.base import ARRAY_DTYPES, EntryArrays
from latentcache.store.layout import Location
from latentcache.store.mapped import PathOf
from latentcache.utils.durable_files import BLOCK_BYTES, open_regular, set_past_cache, unreadable
from latentcache.utils.host_memory import disk_memory

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
