"""Digests of the files that an item is made from."""

from __future__ import annotations

import os
import time
from collections.abc import MutableMapping

from latentcache.identity import digest

SETTLED_NS = 2_000_000_000
"""A file that changed less than this long ago may change again with the same time stamps: its digest is not kept."""


class FileDigests:
    """Digests of files, kept in `memo` by (path, size, mtime_ns, ctime_ns, inode).

    A file that was edited and got its old size and mtime back has another ctime, which programs cannot set. Not
    noticed: a change on a file system without ctime, or with the clock set back to the same nanosecond.
    """

    def __init__(self, memo: MutableMapping[str, str]):
        self._memo = memo

    def __call__(self, path: str) -> tuple[str | None, str | None]:
        """The digest and the signature of the file; (None, None) if there is none. OSError if it cannot be read."""
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return None, None
        signature = _signature(status)
        name = f"onetrainer-file/1 {signature} {os.path.abspath(path)}"
        known = self._memo.get(name)
        if known is not None:
            return known, signature
        with open(path, "rb") as file:
            data = file.read()
            signature = _signature(os.fstat(file.fileno()))
        found = digest(data)
        changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
        if signature == _signature(status) and time.time_ns() - changed_ns > SETTLED_NS:
            self._memo[name] = found
        return found, signature


def signature_of(path: str) -> str | None:
    """It changes when the file does; None if there is no file."""
    try:
        return _signature(os.stat(path))
    except FileNotFoundError:
        return None


def _signature(status: os.stat_result) -> str:
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
