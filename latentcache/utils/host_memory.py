"""The machine's memory: its size, how much of it is free, Python's collector, and aligned memory for direct I/O."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_HUGE_BYTES = 2 << 20
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of madvise(2), which Python does not name
_GROUP = Path("/sys/fs/cgroup")
"""As a container sees its own control group (cgroups(7), version 2)."""


def host_memory() -> int:
    """Bytes of memory: the machine's, or the limit of the control group, as in a container."""
    total: int = psutil.virtual_memory().total
    limit = _number(_GROUP / "memory.max")
    return total if limit is None else min(total, limit)


def free_host_memory() -> int:
    """Bytes that can be taken on the CPU without swapping.

    The least of what the machine has available and what the control group leaves, as in a container.
    """
    free: int = psutil.virtual_memory().available
    limit, used = (_number(_GROUP / name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else min(free, max(0, limit - used))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the collector while the block runs; afterwards it is as before.

    For code that makes many values and no cycles: the collector scans all live objects again and again, and finds
    nothing. Planning took twice as long with it (20,000 samples, with torch and transformers loaded).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def disk_memory(num_bytes: int) -> memoryview:
    """`num_bytes` of memory that starts on a page, for reading or writing past the page cache.

    It is made of huge pages where the system has them: a disk takes half as long again to fill hundreds of small pages
    (docs/benchmarks/write.md). The child of a fork finds it empty.
    """
    memory = mmap.mmap(-1, num_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        _advise(memory, mmap.MADV_HUGEPAGE)
        # A fork must not share these pages: what the disk still writes could go to the wrong copy (open(2)).
        _advise(memory, _WIPE_ON_FORK)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_BYTES
    return memoryview(memory)[start : start + num_bytes]


def _advise(memory: mmap.mmap, advice: int) -> None:
    try:
        memory.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the kernel does not know this advice
            raise


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit
