"""Locks between processes, on a file: shared by many, or exclusive. A dead process has no lock."""

from __future__ import annotations

import os
import platform
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from latentcache.errors import StoreBusyError, StoreError
from latentcache.utils import file_locks
from latentcache.utils.durable_files import typed_errors, unlock_and_close

_MAX_NOTE_BYTES = 4096


@contextmanager
def locked(path: Path, operation: str, *, shared: bool, wait: bool = False, is_brief: bool = False) -> Iterator[None]:
    """Hold the lock on `path` for `operation`. Without `wait`, StoreBusyError names the process that has it.

    A brief operation leaves the name of the one that works for longer.
    """
    fd = _open(path)
    owner = os.getpid()
    try:
        with typed_errors(path, 0):
            if not file_locks.take(fd, shared=shared, wait=wait):
                holder = os.read(fd, _MAX_NOTE_BYTES).decode(errors="replace") or "another process"
                raise StoreBusyError(
                    path.parent, f"{operation} cannot start: {holder} works on this cache. Wait until it is done."
                )
        if not is_brief:
            with suppress(OSError):  # the note is for messages only, and a full disk has no room for it
                # Each process that shares the lock overwrites the note of the others.
                os.ftruncate(fd, 0)
                os.lseek(fd, 0, os.SEEK_SET)
                os.write(fd, f"{operation} (process {os.getpid()} on {platform.node()})".encode())
        yield
    finally:
        unlock_and_close(fd, owner)


def _open(path: Path) -> int:
    with typed_errors(path, _MAX_NOTE_BYTES):
        return os.open(path, file_locks.OPEN_FLAGS, 0o666)


class ReadersLock:
    """Says that this process reads, until it is closed or the process ends. A fork of the process says so too.

    It is a shared lock on a file, whose mtime is the time when the first of those readers began that overlap. Where the
    file cannot be opened nothing is said: a reader that may not write leaves no trace.
    """

    def __init__(self, path: Path):
        self._end: weakref.finalize[[int, int], ReadersLock] | None = None
        with suppress(OSError, StoreError):
            fd = _open(path)
            # Not __del__, which may run when the modules that it needs are gone.
            self._end = weakref.finalize(self, unlock_and_close, fd, os.getpid())
            if file_locks.take(fd):
                os.utime(path)  # no other reader is there
            file_locks.take(fd, shared=True, wait=True)

    def close(self) -> None:
        """The process does not read any more."""
        if self._end is not None:
            self._end()


def readers_since(path: Path) -> float | None:
    """The time (seconds since 1970) before which no reader began that runs now. None: none runs. StoreError."""
    if not os.path.lexists(path):
        return None
    fd = _open(path)
    try:
        return None if file_locks.take(fd) else os.fstat(fd).st_mtime
    finally:
        os.close(fd)


class Claims:
    """Keys whose entries this object's owner is about to make, so that others need not. Threads may share it.

    A claim is a lock on one byte of a file, and which byte follows from the key. So nothing is to be cleaned up: the
    system releases the claims of a process that ends in any way. Where a file system has no such locks every key is
    claimed: then two processes may make an entry, of which one is stored. Forks have the claims too, until they end or
    the owner closes.
    """

    def __init__(self, path: Path):
        self._fd, self._owner = _open(path), os.getpid()

    def take(self, keys: Iterable[str]) -> set[str]:
        """Claim those keys (hexadecimal) that nobody else has claimed, and return them."""
        taken = set()
        for key in keys:
            with suppress(OSError):  # the file system has no locks
                if not file_locks.take(self._fd, at=_byte_of(key)):
                    continue
            taken.add(key)
        return taken

    def release(self, keys: Iterable[str]) -> None:
        """Others may claim these keys from now on."""
        with suppress(OSError):  # the file system has no locks
            for key in keys:
                file_locks.release(self._fd, _byte_of(key))

    def close(self) -> None:
        """Release all claims."""
        unlock_and_close(self._fd, self._owner, None)


def _byte_of(key: str) -> int:
    return int(key[:15], 16)
