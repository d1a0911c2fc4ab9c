"""Advice to the system about ranges of files that are read soon, where they are missing in memory."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from latentcache.errors import StoreError
from latentcache.utils.durable_files import open_regular

ReadAheadMode = Literal["missing", "always", "never"]
"""`missing`: while this thread's reads come from the disk."""

MAX_IDLE_READS = 12
"""After so many checks in which nothing came from the disk, nothing is advised. A batch takes one to three."""
SKIPPED_READS = 7
"""After a check that found nothing, so many reads are not checked: in a small batch a check takes a hundredth."""

_MAX_FILES = 64  # open at once

CAN_ADVISE = hasattr(os, "posix_fadvise")
"""Python offers no such call on macOS: there nothing is advised."""


class _ThreadCounters(threading.local):
    """What a thread's reads have caused.

    `skip` reads need no check. `idle_reads` checks in turn found nothing from the disk. `blocks_read` is the system's
    counter at the last check.
    """

    skip = 0
    idle_reads = 0
    blocks_read: int | None = None


class ReadAhead:
    """Whether the calling thread should advise the system. Each thread decides for itself.

    Advice about bytes that are in memory already takes more than half of a copy. So by default it is given while pages
    are missing: at a thread's first read, and until MAX_IDLE_READS checks in turn have found nothing from the disk.
    Bytes that the thread's own advice brought count too, so it goes on as long as it helps. Then every eighth read is
    checked. Where the system does not count per thread (only Linux does), nothing is advised: the warm case matters
    more.
    """

    def __init__(self, mode: ReadAheadMode = "missing"):
        self.mode: ReadAheadMode = mode if CAN_ADVISE else "never"
        self._who = getattr(resource, "RUSAGE_THREAD", None)
        if self._who is None and mode == "missing":
            self.mode = "never"
        self._thread = _ThreadCounters()

    def should_prefetch(self) -> bool:
        """Whether to advise now. It checks what the thread's reads before this one have caused."""
        thread = self._thread
        if thread.skip:
            thread.skip -= 1
            return False
        if self.mode != "missing":
            return self.mode == "always"
        assert self._who is not None
        usage = resource.getrusage(self._who)
        # Faults in mapped pages, and blocks that were read because of advice.
        blocks_read = usage.ru_majflt + usage.ru_inblock
        thread.idle_reads = thread.idle_reads + 1 if blocks_read == thread.blocks_read else 0
        thread.blocks_read = blocks_read
        if thread.idle_reads < MAX_IDLE_READS:
            return True
        thread.skip = SKIPPED_READS
        return False


def advise(ranges: Iterable[tuple[Path, int, int]]) -> None:
    """Ask the system to bring ranges of files (path, offset, number of bytes) into memory, and wait for nothing.

    They come in this order: the first can be used while the others are on their way. A file that cannot be opened is
    passed over, because the read that follows reports what is wrong with it. A file whose file system takes no such
    advice is passed over too. No descriptor stays open.
    """
    files: dict[Path, int | None] = {}
    try:
        for path, offset, num_bytes in ranges:
            if path not in files:
                if len(files) >= _MAX_FILES:
                    _close(files)
                files[path] = _opened(path)
            fd = files[path]
            if fd is not None:
                try:
                    os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_WILLNEED)
                except OSError:
                    files[path] = None
                    os.close(fd)
    finally:
        _close(files)


def _opened(path: Path) -> int | None:
    try:
        return open_regular(path)
    except (OSError, StoreError):
        return None


def _close(files: dict[Path, int | None]) -> None:
    while files:
        _, fd = files.popitem()
        if fd is not None:
            os.close(fd)
