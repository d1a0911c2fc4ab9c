"""Asking the system for bytes of files before they are read, where they are missing in memory."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from latentcache.errors import StoreError
from latentcache.utils.durable_files import open_regular

AskAhead = Literal["missing", "always", "never"]
"""`missing`: while this thread's reads come from the disk."""

QUIET_READS = 12
"""So many looks in which nothing came from the disk, and it is no longer asked ahead. A batch that is not held takes
three."""
UNSEEN_READS = 7
"""After a read that needed nothing the next ones are not looked at: in a small batch a look is a hundredth."""

_MAX_FILES = 64  # open at once

MAX_ASKED = 1 << 14
"""Keys that a thread has asked for and not read yet. Beyond it they are forgotten, and asked for again."""

CAN_ASK = hasattr(os, "posix_fadvise")
"""Python offers no such call on macOS: there nothing is asked ahead."""


class _Thread(threading.local):
    """What a thread's reads have caused: the counters at the last look, how many brought nothing since, how many need
    no look, and the keys that were asked for."""

    unseen = 0
    quiet = 0
    brought: int | None = None

    def __init__(self) -> None:
        self.asked: set[str] = set()


class ReadAhead:
    """Whether the calling thread should ask ahead. Each thread decides for itself.

    Asking for what is in memory already costs more than half of a copy, so by default it is done while pages are
    missing: at a thread's first read, and until QUIET_READS looks in turn have found nothing from the disk. What the
    thread asked for counts too, so it goes on as long as it helps. Then every eighth read is looked at. Where the
    system does not count per thread (only Linux does), nothing is asked: the warm case matters more.
    """

    def __init__(self, mode: AskAhead = "missing"):
        self.mode: AskAhead = mode if CAN_ASK else "never"
        self._who = getattr(resource, "RUSAGE_THREAD", None)
        if self._who is None and mode == "missing":
            self.mode = "never"
        self._thread = _Thread()

    def wanted(self) -> bool:
        """Whether to ask ahead for the read that comes now. It looks at what the reads before it have caused."""
        thread = self._thread
        if thread.unseen:
            thread.unseen -= 1
            return False
        if self.mode != "missing":
            return self.mode == "always"
        assert self._who is not None
        usage = resource.getrusage(self._who)
        # Faults in mapped pages, and blocks that were read because they were asked for.
        brought = usage.ru_majflt + usage.ru_inblock
        thread.quiet = thread.quiet + 1 if brought == thread.brought else 0
        thread.brought = brought
        if thread.quiet < QUIET_READS:
            return True
        thread.unseen = UNSEEN_READS
        thread.asked.clear()
        return False

    def wanted_lately(self) -> bool:
        """The answer to the last `wanted` of this thread; True if there was none."""
        if self.mode != "missing":
            return self.mode == "always"
        return self._thread.quiet < QUIET_READS

    def to_ask(self, keys: Iterable[str]) -> list[str]:
        """Those of the keys, which are read later, that this thread has not asked for already."""
        asked = self._thread.asked
        if len(asked) > MAX_ASKED:
            asked.clear()
        new = [key for key in keys if key not in asked]
        asked.update(new)
        return new

    def to_ask_now(self, keys: Iterable[str]) -> list[str]:
        """Those of the keys, which are read now, that this thread has not asked for."""
        asked = self._thread.asked
        new = [key for key in keys if key not in asked]
        asked.difference_update(keys)
        return new


def ask_for(ranges: Iterable[tuple[Path, int, int]]) -> None:
    """Ask the system to bring ranges of files (path, offset, number of bytes) into memory. It is not waited for.

    They come in this order: the first can be used while the others are on their way. A file that cannot be opened is
    passed over: the read that follows says what is wrong with it. So is one whose file system takes no such advice. No
    descriptor stays open.
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
