"""Inter-process locks on files, shared or exclusive. They end with the process."""

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
    """Hold the lock on `path` for `operation`. Without `wait`, StoreBusyError names the process that holds it.

    A brief operation does not overwrite the name of a longer one that shares the lock.
    """
    fd = _open(path)
    owner = os.getpid()
    try:
        with typed_errors(path, 0):
            if not file_locks.take(fd, shared=shared, wait=wait):
                holder = os.read(fd, _MAX_NOTE_BYTES).decode(errors="replace") or "another process"
                raise StoreBusyError(
                    path.parent, f"{operation} cannot start: {holder} is using this cache. Try again when it is done."
                )
        if not is_brief:
            with suppress(OSError):  # the note is only for messages, and the disk may be full
                # Processes that share the lock overwrite each other's note.
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
    """Marks this process as a reader until it is closed or the process ends. Forks of the process count as readers too.

    It is a shared lock on one byte of a file: its offset is when the reader began, in ns by the file system's clock. If
    the file cannot be opened this is a no-op: a reader without write access leaves no trace.
    """

    def __init__(self, path: Path):
        self._end: weakref.finalize[[int, int, None], ReadersLock] | None = None
        with suppress(OSError, StoreError):
            fd = _open(path)
            # Not __del__, which may run after the modules that it needs are gone.
            self._end = weakref.finalize(self, unlock_and_close, fd, os.getpid(), None)
            os.utime(path)
            file_locks.take(fd, shared=True, wait=True, at=os.fstat(fd).st_mtime_ns)

    def close(self) -> None:
        """Release the lock: this process has stopped reading."""
        if self._end is not None:
            self._end()


def is_read_since(path: Path, time_ns: int) -> bool:
    """Whether a reader runs that began at this time or before it, for `path` of `ReadersLock`. StoreError.

    Where locks cover whole files (macOS), any reader counts.
    """
    with typed_errors(path, 0), suppress(FileNotFoundError):  # not `exists`, which says no if it may not look
        fd = os.open(path, file_locks.OPEN_FLAGS & ~os.O_CREAT)
        try:
            return not file_locks.take(fd, at=0, num_bytes=time_ns + 1)
        finally:
            os.close(fd)
    return False


class Claims:
    """Keys whose entries this process is about to make, so that other processes need not. It is thread-safe.

    A claim is a lock on one byte of a file; the key determines the byte. Nothing needs cleaning up, since the system
    releases the claims of a process when it ends. On a file system without such locks every claim succeeds, so two
    processes may make the same entry, and one copy is stored. Forks share the claims until they end or the owner
    closes them.
    """

    def __init__(self, path: Path):
        self._fd, self._owner = _open(path), os.getpid()

    def take(self, keys: Iterable[str]) -> set[str]:
        """Claim the keys (hexadecimal) that no other process has claimed, and return them."""
        taken = set()
        for key in keys:
            with suppress(OSError):  # the file system does not support locks
                if not file_locks.take(self._fd, at=_byte_of(key)):
                    continue
            taken.add(key)
        return taken

    def release(self, keys: Iterable[str]) -> None:
        """Give up the claims on these keys."""
        with suppress(OSError):  # the file system does not support locks
            for key in keys:
                file_locks.release(self._fd, _byte_of(key))

    def close(self) -> None:
        """Release all claims."""
        unlock_and_close(self._fd, self._owner, None)


def _byte_of(key: str) -> int:
    return int(key[:15], 16)
