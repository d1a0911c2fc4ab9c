"""Locks between processes, on a file: shared by many, or exclusive. A dead process has no lock."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import struct
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from latentcache.errors import StoreBusyError, StoreError, UnsafeStoreError
from latentcache.utils.durable_files import typed_errors, unlock_and_close

_MAX_NOTE_BYTES = 4096


@contextmanager
def locked(path: Path, operation: str, *, shared: bool, wait: bool = False, is_brief: bool = False) -> Iterator[None]:
    """Hold the lock on `path` for `operation`. Without `wait`, StoreBusyError names the process that has it.

    A brief operation leaves the name of the one that works for longer. Raises UnsafeStoreError if `path` is not a file
    of its own.
    """
    fd = _open(path)
    owner = os.getpid()
    try:
        mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        with typed_errors(path, 0):
            try:
                fcntl.flock(fd, mode if wait else mode | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StoreBusyError(
                    path.parent, f"{operation} cannot start: {_holder(fd)} works on this cache. Wait until it is done."
                ) from error
        if not is_brief:
            with suppress(OSError):  # the note is for messages only, and a full disk has no room for it
                _sign(fd, operation)
        yield
    finally:
        if os.getpid() == owner:
            unlock_and_close(fd)
        else:
            os.close(fd)  # a forked child must not release its parent's lock


def _open(path: Path) -> int:
    """Open or make a lock's file. Raises UnsafeStoreError for any other file, which the note would overwrite."""
    with typed_errors(path, _MAX_NOTE_BYTES):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            status = os.fstat(fd)
        except OSError:
            os.close(fd)
            raise
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(fd)
        raise UnsafeStoreError(path, "is a second name of another file, or no regular file; remove it and try again")
    return fd


def _sign(fd: int, operation: str) -> None:
    # Each process that shares the lock overwrites the note of the others.
    note = json.dumps({"operation": operation, "pid": os.getpid(), "host": os.uname().nodename}).encode()
    os.ftruncate(fd, 0)
    os.pwrite(fd, note, 0)


def _holder(fd: int) -> str:
    try:
        note = json.loads(os.pread(fd, _MAX_NOTE_BYTES, 0))
        return f"{note['operation']} (process {int(note['pid'])} on {note['host']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


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
            self._end = weakref.finalize(self, _unlock_reader, fd, os.getpid())
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.utime(fd)  # no other reader is there
            fcntl.flock(fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """The process does not read any more."""
        if self._end is not None:
            self._end()


def _unlock_reader(fd: int, owner: int) -> None:
    if os.getpid() == owner:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a fork has the same lock, and may live on
    os.close(fd)


def readers_since(path: Path) -> float | None:
    """The time (seconds since 1970) before which no reader began that runs now. None: none runs. StoreError."""
    if not os.path.lexists(path):
        return None
    fd = _open(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)


class Claims:
    """Keys whose entries this object's owner is about to make, so that others need not. Threads may share it.

    A claim is a lock on one byte of a file, and which byte follows from the key. So nothing is to be cleaned up: the
    system releases the claims of a process that ends in any way. Where a file system has no such locks every key is
    claimed: then two processes may make an entry, of which one is stored. On Linux a lock belongs to the open file. Its
    forks have it too, until they end or the owner closes. Elsewhere locks are those of the process: its other
    Claims on the file do not see them, and the first of these to close frees them all.
    """

    def __init__(self, path: Path):
        self._fd, self._owner = _open(path), os.getpid()

    def take(self, keys: Iterable[str]) -> set[str]:
        """Claim those keys (hexadecimal) that nobody else has claimed, and return them."""
        taken = set()
        for key in keys:
            try:
                _lock_bytes(self._fd, fcntl.LOCK_EX, 1, _byte_of(key))
            except (BlockingIOError, PermissionError):  # POSIX has both for a lock that another one has
                continue
            except OSError:
                pass
            taken.add(key)
        return taken

    def release(self, keys: Iterable[str]) -> None:
        """Others may claim these keys from now on."""
        for key in keys:
            with suppress(OSError):
                _lock_bytes(self._fd, fcntl.LOCK_UN, 1, _byte_of(key))

    def close(self) -> None:
        """Release all claims."""
        if os.getpid() == self._owner:
            with suppress(OSError):
                _lock_bytes(self._fd, fcntl.LOCK_UN, 0, 0)  # a fork has the same locks, and may live on
        os.close(self._fd)


def _lock_bytes(fd: int, operation: int, num_bytes: int, start: int) -> None:
    """Lock so many bytes (0: all) for nobody else, or unlock them, at once. BlockingIOError, PermissionError: no."""
    if sys.platform == "linux":
        kind = fcntl.F_UNLCK if operation == fcntl.LOCK_UN else fcntl.F_WRLCK
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, start, num_bytes, 0))
    else:
        fcntl.lockf(fd, operation | fcntl.LOCK_NB, num_bytes, start)


def _byte_of(key: str) -> int:
    return int(key[:15], 16)
