"""Reads that the kernel does while the thread goes on: Linux's native asynchronous I/O.

See io_submit(2), and aio(7) for how it differs from POSIX's.

Why not threads that each read: between two of a thread's calls it waits for Python's lock, and eight of them read half
as fast as one queue does (docs/benchmarks/retrieve.md). Why not libaio: it is a wrapper of these four calls, and is not
installed everywhere. Only files that were opened past the page cache are read asynchronously.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

_X86 = {"io_setup": 206, "io_destroy": 207, "io_getevents": 208, "io_submit": 209}
_GENERIC = {"io_setup": 0, "io_destroy": 1, "io_submit": 2, "io_getevents": 4}
_NUMBERS = {"x86_64": _X86, "aarch64": _GENERIC, "riscv64": _GENERIC}
"""Of the calls, by machine: arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h."""

_READ = 0  # IOCB_CMD_PREAD
_IOCB = np.dtype(
    [
        ("tag", "<u8"),
        ("key", "<u4"),
        ("flags", "<u4"),
        ("operation", "<u2"),
        ("priority", "<i2"),
        ("fd", "<u4"),
        ("address", "<u8"),
        ("num_bytes", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8", 2),
    ]
)
"""struct iocb of include/uapi/linux/aio_abi.h, for little-endian machines."""
_EVENT = np.dtype([("tag", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result_2", "<i8")])
_POINTER_BYTES = 8


class Piece(NamedTuple):
    """A read of `num_bytes` from `offset` to `address`. `tag` comes back with what became of it."""

    tag: int
    fd: int
    address: int
    num_bytes: int
    offset: int


def _calls() -> tuple[Callable[..., int], dict[str, int]] | None:
    numbers = _NUMBERS.get(platform.machine())
    if sys.platform != "linux" or sys.byteorder != "little" or sys.maxsize < 1 << 32 or numbers is None:
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return call, numbers


class ReadQueue:
    """Reads under way, at most `depth`. It is one thread's, and not a fork's child's.

    OSError where this system has none, or refuses one: EAGAIN when all queues together are larger than
    /proc/sys/fs/aio-max-nr. To end one takes some 30 ms.
    """

    _context = 0

    def __init__(self, depth: int):
        self.depth = depth
        self.num_under_way = 0
        self._pid = os.getpid()
        found = _calls()
        if found is None:
            raise OSError(errno.ENOSYS, f"there are no asynchronous reads on {sys.platform} {platform.machine()}")
        self._syscall, self._numbers = found
        self._events = np.zeros(depth, _EVENT)
        context = ctypes.c_ulong(0)
        self._call("io_setup", depth, ctypes.addressof(context))
        self._context = context.value

    def _call(self, name: str, *arguments: int) -> int:
        result = self._syscall(ctypes.c_long(self._numbers[name]), *map(ctypes.c_long, arguments))
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")
        return result

    @property
    def room(self) -> int:
        """How many more reads may be begun."""
        return self.depth - self.num_under_way

    def submit(self, pieces: Sequence[Piece]) -> None:
        """Begin these reads; there must be room for them. Their files may be closed as soon as this is back.

        The memory must stay until `reap` gave the piece back. OSError: those that were not begun never come back.
        """
        assert len(pieces) <= self.room
        control = np.zeros(len(pieces), _IOCB)
        control["operation"] = _READ
        for name, column in zip(Piece._fields, zip(*pieces, strict=True), strict=False):
            control[name] = column
        pointers = control.ctypes.data + _IOCB.itemsize * np.arange(len(pieces), dtype=np.uint64)
        begun = 0
        while begun < len(pieces):
            start = pointers.ctypes.data + _POINTER_BYTES * begun
            count = self._call("io_submit", self._context, len(pieces) - begun, start)
            begun += count
            self.num_under_way += count

    def reap(self, at_least: int) -> list[tuple[int, int]]:
        """Of reads that ended, each one's tag with its number of bytes, or a negative error number.

        It waits until there are `at_least` so many, which must be under way.
        """
        assert at_least <= self.num_under_way
        while True:
            try:
                count = self._call("io_getevents", self._context, at_least, self.depth, self._events.ctypes.data, 0)
                break
            except InterruptedError:
                continue  # Python's own handler of the signal has run, and raised nothing
        self.num_under_way -= count
        ended = self._events[:count]
        return list(zip(ended["tag"].tolist(), ended["result"].tolist(), strict=True))

    def close(self) -> None:
        """Wait for what is under way, and end."""
        context, self._context = self._context, 0
        if context and self._pid == os.getpid():
            self._call("io_destroy", context)

    def __del__(self) -> None:
        self.close()
