"""Locks between processes, on a file: shared by many, or exclusive. A dead process has no lock."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from latentcache.errors import StoreBusyError, UnsafeStoreError
from latentcache.utils.durable_files import typed_errors, unlock_and_close

_MAX_NOTE_BYTES = 4096


@contextmanager
def locked(path: Path, operation: str, *, shared: bool, wait: bool = False) -> Iterator[None]:
    """Hold the lock on `path` for `operation`. Without `wait`, StoreBusyError names the process that has it.

    Raises UnsafeStoreError if `path` is not a file of its own.
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
