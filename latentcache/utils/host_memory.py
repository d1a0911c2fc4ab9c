"""The machine's memory: how much there is for this process, how much of it is free, and memory for a disk."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from pathlib import Path

_HUGE_BYTES = 2 << 20
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of madvise(2), which Python does not name
_GROUP = Path("/sys/fs/cgroup")
"""As a container sees its own control group (cgroups(7), version 2)."""


def host_memory() -> int:
    """Bytes of memory: the machine's, or what the control group is limited to, as in a container."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _number(_GROUP / "memory.max")
    return total if limit is None else min(total, limit)


def free_host_memory() -> int | None:
    """Bytes that can be taken on the CPU without swapping, or None where the system does not tell (only Linux does).

    The least of MemAvailable and what the control group leaves, as in a container.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "MemAvailable" not in fields:
        return None
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (_number(_GROUP / name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else min(free, max(0, limit - used))


def disk_memory(num_bytes: int) -> memoryview:
    """So much memory of this process, for reading or writing past the page cache: it starts on a page.

    In huge pages, where the system has them: a disk that is given hundreds of small pages takes half as long again
    (docs/benchmarks/write.md). A fork's child finds it empty.
    """
    memory = mmap.mmap(-1, num_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        _advise(memory, mmap.MADV_HUGEPAGE)
        # A fork must not share these pages: what the disk still writes to them could go to the wrong copy (open(2)).
        _advise(memory, _WIPE_ON_FORK)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_BYTES
    return memoryview(memory)[start : start + num_bytes]


def _advise(memory: mmap.mmap, advice: int) -> None:
    try:
        memory.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel that does not know it
            raise


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit
