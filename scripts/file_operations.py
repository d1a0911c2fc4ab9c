"""Count, refuse and record file operations below a folder, including those of SQLite, torch and safetensors.

`preloaded(main)` restarts a program with the library of file_operations.c preloaded, which `FileOperations(root)` then
controls. This needs Linux, glibc and a C compiler named `cc`. close() is never refused, because the kernel closes the
file in any case. mmap() is not intercepted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_suffix(".c")
LIBRARY = "latentcache_file_operations.so"

OPERATIONS = (
    *("open", "create", "read", "write", "sync", "rename", "unlink", "mkdir", "rmdir", "truncate"),
    *("lock", "list", "stat"),
)
KILL = 0
"""In place of an error: SIGKILL for this process."""
REFUSALS: dict[int, tuple[str, ...]] = {
    KILL: ("create", "write", "sync", "rename", "unlink", "mkdir", "rmdir", "truncate"),
    errno.ENOSPC: ("create", "write", "sync", "rename", "mkdir", "truncate"),
    errno.EIO: OPERATIONS,
    errno.EACCES: ("open", "create", "rename", "unlink", "mkdir", "rmdir", "list", "stat"),
    errno.EMFILE: ("open", "create", "list"),
}
"""The operations that can fail with each error; a process is killed before a change."""
NEVER = 1 << 60


class Change(NamedTuple):
    """A recorded operation. Paths are relative to the root; `offset` is the length for a truncation.

    An inode number `ino` may be reused once the file is removed.
    """

    operation: str
    path: str
    path_2: str
    ino: int
    offset: int
    data: bytes


_HEAD = struct.Struct("=III4xQqQ")


def preloaded(main: Callable[[], int]) -> int:
    """Run `main` in a copy of this process with the library preloaded. Returns its exit code, or 77 if unsupported."""
    if LIBRARY in os.environ.get("LD_PRELOAD", ""):
        return main()
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        print("skipped: this program needs Linux and a C compiler named cc", file=sys.stderr)
        return 77
    with tempfile.TemporaryDirectory(prefix="file-operations-") as folder:
        library = str(Path(folder) / LIBRARY)
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, str(SOURCE), "-ldl"], check=True)
        return subprocess.run([sys.executable, *sys.argv], env=os.environ | {"LD_PRELOAD": library}).returncode


class FileOperations:
    """Controls the preloaded library. `root` is the watched folder; a process watches only one."""

    def __init__(self, root: Path):
        self._library = ctypes.CDLL(None)
        self._library.fo_num_seen.restype = ctypes.c_long
        self._library.fo_watch(os.fsencode(root))

    @contextmanager
    def refusing(self, at: int, error: int, *, for_ever: bool = False) -> Iterator[None]:
        """Make the `at`-th operation that can raise this error fail (and, `for_ever`, all later ones)."""
        mask = sum(1 << OPERATIONS.index(name) for name in REFUSALS[error])
        self._library.fo_fail(ctypes.c_long(at), error, int(for_ever), mask)
        try:
            yield
        finally:
            self.num_seen = self._library.fo_num_seen()
            self._library.fo_fail(ctypes.c_long(0), 0, 0, 0)

    @contextmanager
    def recording(self) -> Iterator[list[Change]]:
        """Record the changes made in the block. The list is filled when the block ends."""
        changes: list[Change] = []
        with tempfile.TemporaryFile() as log:
            self._library.fo_record(log.fileno())
            try:
                yield changes
            finally:
                self._library.fo_record(-1)
                log.seek(0)
                while head := log.read(_HEAD.size):
                    number, path_length, path_2_length, ino, offset, length = _HEAD.unpack(head)
                    path, path_2 = (os.fsdecode(log.read(size)) for size in (path_length, path_2_length))
                    changes.append(Change(OPERATIONS[number], path, path_2, ino, offset, log.read(length)))
