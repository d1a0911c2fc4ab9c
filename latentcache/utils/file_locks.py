"""Shared and exclusive locks on bytes of a file, with one interface for Linux, macOS and Windows.

A lock belongs to the open file description (OFD locks, LockFileEx), not to the process, so closing another descriptor
of the file releases nothing. The system releases the locks of a process that dies. On POSIX a child that inherits the
descriptor shares the lock; on Windows children do not inherit it. Python lacks OFD locks on macOS, so there every lock
covers the whole file (flock).
"""

from __future__ import annotations

import errno
import os
import struct
import sys

READ_FLAGS = os.O_RDONLY
for _name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"):
    READ_FLAGS |= getattr(os, _name, 0)
"""Flags for opening any file for reading. Opening a pipe does not block."""
OPEN_FLAGS = READ_FLAGS | os.O_RDWR | os.O_CREAT
"""Flags for opening a file to lock it; the file is created if needed."""
FAR = 1 << 62
"""A byte beyond the end of any file: Windows blocks reads of locked bytes, and a lock file's note must be readable."""

if sys.platform == "win32":
    import ctypes
    import msvcrt

    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    _EXCLUSIVE, _AT_ONCE = 2, 1
    _TAKEN = (33, 997)  # ERROR_LOCK_VIOLATION, ERROR_IO_PENDING

    def take(fd: int, *, shared: bool = False, wait: bool = False, at: int = FAR, num_bytes: int = 1) -> bool:
        """Lock bytes of an open file, like on other systems."""
        flags = (0 if shared else _EXCLUSIVE) | (0 if wait else _AT_ONCE)
        if _kernel.LockFileEx(_handle(fd), flags, 0, num_bytes & 0xFFFFFFFF, num_bytes >> 32, _overlapped(at)):
            return True
        code = ctypes.get_last_error()
        if code in _TAKEN:
            return False
        raise ctypes.WinError(code)

    def release(fd: int, at: int | None = FAR) -> None:
        """Release the lock on the byte `at`. None means all locks, which Windows releases when the file is closed."""
        if at is not None:
            _kernel.UnlockFileEx(_handle(fd), 0, 1, 0, _overlapped(at))

    def _handle(fd: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(msvcrt.get_osfhandle(fd))

    def _overlapped(at: int) -> ctypes.Array[ctypes.c_char]:
        """An OVERLAPPED structure: two pointers, the low and high half of the offset, and an event."""
        return ctypes.create_string_buffer(struct.pack("PPIIP", 0, 0, at & 0xFFFFFFFF, at >> 32, 0))

else:
    import fcntl

    _IS_OFD = hasattr(fcntl, "F_OFD_SETLK")

    def take(fd: int, *, shared: bool = False, wait: bool = False, at: int = FAR, num_bytes: int = 1) -> bool:
        """Lock bytes of an open file.

        Args:
            fd: The file's descriptor, open for writing, or at least for reading if the lock is shared.
            shared: Allow other shared locks on the bytes.
            wait: Block until the lock is free.
            at: The first byte's offset. The bytes may lie beyond the end of the file.
            num_bytes: How many bytes to lock.

        Returns:
            Whether the lock was taken. Always true with `wait`.

        Raises:
            OSError: The file system does not support locks, or fails.
        """
        try:
            if _IS_OFD:
                command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
                fcntl.fcntl(fd, command, _range(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, at, num_bytes))
            else:
                mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
                fcntl.flock(fd, mode if wait else mode | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def release(fd: int, at: int | None = FAR) -> None:
        """Release the lock on the byte `at` (None: on all bytes), also for processes that share the open file.

        OSError: the file system fails.
        """
        if _IS_OFD:
            # A length of 0 means up to the end.
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, at or 0, 0 if at is None else 1))
        else:
            fcntl.flock(fd, fcntl.LOCK_UN)

    def _range(kind: int, at: int, num_bytes: int) -> bytes:
        return struct.pack("hhqqi4x", kind, os.SEEK_SET, at, num_bytes, 0)
