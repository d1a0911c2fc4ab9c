"""What an item is made from: the bytes of its files, by their digests."""

from __future__ import annotations

import os
import time
from collections.abc import MutableMapping

from latentcache.identity import digest

SETTLED_NS = 2_000_000_000
"""A file that changed less than this long ago may change again with the same time stamps: its digest is not
remembered."""


class FileDigests:
    """Digests of files, remembered by (path, size, mtime_ns, ctime_ns, inode) in `memo`.

    So a file that was edited with its old size and mtime put back is noticed by its ctime, which programs cannot set.
    Not noticed: a change on a file system that keeps no ctime, or while the clock is set back to the very nanosecond.
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
    """What tells whether a file is still the same, or None if there is none."""
    try:
        return _signature(os.stat(path))
    except FileNotFoundError:
        return None


def _signature(status: os.stat_result) -> str:
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
