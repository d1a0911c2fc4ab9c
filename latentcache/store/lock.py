"""Locks between processes, held on a file: many may share one, or one may hold it alone. A dead process holds none."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from latentcache.errors import StoreBusyError
from latentcache.files import typed_errors

_MAX_NOTE_BYTES = 4096


@contextmanager
def locked(path: Path, operation: str, *, shared: bool, wait: bool = False) -> Iterator[None]:
    """Hold the lock on `path` for `operation`. Without `wait`, StoreBusyError says who holds it."""
    with typed_errors(path, _MAX_NOTE_BYTES):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(fd, mode if wait else mode | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreBusyError(
                path.parent, f"{operation} cannot start: {_holder(fd)} works on this cache. Wait until it is done."
            ) from error
        _sign(fd, path, operation)
        yield
    finally:
        os.close(fd)


def _sign(fd: int, path: Path, operation: str) -> None:
    # The note is for people only; the lock is what counts. So it is simply overwritten, and the last sharer signs.
    note = json.dumps({"operation": operation, "pid": os.getpid(), "host": os.uname().nodename}).encode()
    with typed_errors(path, len(note)):
        os.ftruncate(fd, 0)
        os.pwrite(fd, note, 0)


def _holder(fd: int) -> str:
    try:
        note = json.loads(os.pread(fd, _MAX_NOTE_BYTES, 0))
        return f"{note['operation']} (process {int(note['pid'])} on {note['host']})"
    except (ValueError, KeyError, TypeError):
        return "another process"
