"""Entries read past the page cache: for packs that memory cannot hold.

The page cache would make room for each page, only to drop it before it is asked for again. That takes a processor as
long as the disk takes to read it (docs/benchmarks/retrieve.md).
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from latentcache.errors import StoreError, UnsafeStoreError
from latentcache.store.aio import Piece, ReadQueue
from latentcache.store.aligned_buffers import Slabs
from latentcache.store.location import Location
from latentcache.utils.durable_files import BLOCK_BYTES, open_regular, set_past_cache, unreadable

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

logger = logging.getLogger("latentcache")


class Read:
    """One entry on its way: it comes to lie in `data`, as `inside` says."""

    __slots__ = ("begun", "data", "error", "inside", "is_whole", "location", "num_left", "path")

    def __init__(self, location: Location, path: Path, data: np.ndarray, inside: Location, begun: int):
        self.location, self.path, self.data, self.inside = location, path, data, inside
        self.begun = begun  # as the thread counts its reads
        self.num_left = 0  # fields that are under way
        self.is_whole = True
        self.error: StoreError | None = None

    def fail(self, error: OSError) -> None:
        """It cannot be read now, for this reason. `DirectReads.wait` raises it."""
        self.error = unreadable(self.path, error)
        self.error.__cause__ = error


class _Part(NamedTuple):
    """A field's whole blocks: where they come to lie, the offset in the file, and the least that the field needs."""

    array: np.ndarray
    offset: int
    least: int


class DirectReads:
    """One thread's reads. OSError as for `ReadQueue`.

    `is_broken` after what is no StoreError, as Ctrl-C: what is counted here may not be what the kernel does.
    """

    is_broken = False

    def __init__(self, path_of: Callable[[str], Path]):
        self._path_of = path_of
        self._queue = ReadQueue(DEPTH)
        self._slabs = Slabs()
        self._asked: dict[str, Read] = {}
        self._asked_bytes = 0
        self._num_reads = 0
        # By tag, with the least that must come. They keep the memory that is read into, whoever has forgotten it.
        self._under_way: dict[int, tuple[Read, int]] = {}
        self._num_tags = 0

    def ask(self, wanted: Mapping[str, Location]) -> None:
        """Begin to read these entries, which `begin` returns later. It waits for nothing."""
        with self._unbroken():
            self._reap(0)
            self._forget_waiting()
            new: dict[str, tuple[Read, list[_Part]]] = {}
            room, num_bytes = self._queue.room, self._asked_bytes
            for key, location in wanted.items():
                if key in self._asked:
                    continue
                room -= len(location.offsets)
                if room < 0 or num_bytes >= MAX_ASKED_BYTES:
                    break
                try:
                    new[key] = self._made(location)
                except StoreError:
                    break  # it comes up again when the entry is read
                num_bytes += new[key][0].data.nbytes
            self._begin(new.values())
            self._asked.update((key, read) for key, (read, _) in new.items())
            self._asked_bytes = num_bytes

    def begin(self, wanted: Mapping[str, Location]) -> dict[str, Read]:
        """The reads of these entries, in order. `wait` for each. Their memory lives as long as arrays refer to it."""
        with self._unbroken():
            self._num_reads += 1
            reads: dict[str, Read] = {}
            new: list[tuple[Read, list[_Part]]] = []
            for key, location in wanted.items():
                read = self._take(key)
                if read is None or read.location != location or read.error is not None:
                    new.append(self._made(location))
                    read = new[-1][0]
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
        return read.is_whole

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

    def _made(self, location: Location) -> tuple[Read, list[_Part]]:
        windows, offsets, at = [], [], 0
        for offset, num_bytes in zip(location.offsets, location.spec.sizes, strict=True):
            first = offset // BLOCK_BYTES * BLOCK_BYTES
            end = at + -(-(offset + num_bytes - first) // BLOCK_BYTES) * BLOCK_BYTES
            windows.append((at, end, first, offset + num_bytes - first))
            offsets.append(at + offset - first)
            at = end
        path = self._path_of(location.pack)
        try:
            data = self._slabs.take(at)
        except (OSError, MemoryError) as error:
            raise unreadable(path, error) from error
        inside = Location(location.pack, location.digest, location.spec, tuple(offsets))
        read = Read(location, path, data, inside, self._num_reads)
        return read, [_Part(data[start:end], first, least) for start, end, first, least in windows]

    def _begin(self, reads: Iterable[tuple[Read, list[_Part]]]) -> None:
        rest = iter(reads)
        while group := list(islice(rest, _TOGETHER)):
            files: list[int] = []
            pieces: list[Piece] = []
            try:
                for read, parts in group:
                    fd = _opened(read)
                    if fd is None:
                        continue
                    files.append(fd)
                    read.num_left = len(parts)
                    for array, offset, least in parts:
                        self._num_tags += 1
                        self._under_way[self._num_tags] = read, least
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
            least = self._under_way[tag][1]
            read = self._end(tag)
            if result < 0:
                read.fail(OSError(-result, os.strerror(-result)))
            elif result < least:
                read.is_whole = False

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
        read.is_whole = False
    except (FileNotFoundError, UnsafeStoreError):
        read.is_whole = False
    except StoreError as error:
        read.error = error
    return None


class _Thread(threading.local):
    """Each thread's own reads. A fork's child has none: its parent's queue is not its own."""

    pid = -1
    reads: DirectReads | None = None


class DirectReader:
    """Each thread's `DirectReads`. No descriptor stays open. `path_of` gives a pack's file.

    A thread for which the system has no queue is told so: with `must`, by a StoreError. `may_work` until the system
    said that it has none for any thread.
    """

    def __init__(self, path_of: Callable[[str], Path], *, must: bool):
        self._path_of = path_of
        self._must = must
        self.may_work = True
        self._thread = _Thread()

    def mine(self) -> DirectReads | None:
        """Those of the calling thread."""
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
        self.may_work = self.may_work and error.errno == errno.EAGAIN
        message = (
            f"this thread cannot read past the page cache: {error}. With EAGAIN, raise fs.aio-max-nr or read in fewer "
            "threads"
        )
        if self._must:
            raise StoreError(f"{message}; or open the cache with io='mapped'") from error
        logger.warning("%s. It reads through the page cache.", message)

    def close(self) -> None:
        """End the calling thread's reads. Those of others end with their threads, or with this."""
        if self._thread.reads is not None and self._thread.pid == os.getpid():
            self._thread.reads.close()
        self._thread.reads = None
