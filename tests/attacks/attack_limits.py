"""What an attack may cost, and what may lie where a file is expected."""

from __future__ import annotations

import faulthandler
import os
import re
import resource
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

MAX_S = 120
"""By the clock: the tests of a lane share the processor."""
MAX_BYTES = 256 << 20
SPARSE_BYTES = 200 << 30
GUARD_BYTES = 4 << 30
"""Address space: allocators reserve more than they use."""


@contextmanager
def within_limits() -> Iterator[None]:
    """Fail a block that takes longer than MAX_S, or after which the process' resident memory has a higher peak.

    What the block asks for beyond GUARD_BYTES is a MemoryError, so that the machine survives it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_status_bytes("VmData") + GUARD_BYTES, hard))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is resident now
    before = _status_bytes("VmRSS")
    faulthandler.dump_traceback_later(MAX_S, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    grown = _status_bytes("VmHWM") - before
    assert grown <= MAX_BYTES, f"memory grew by {grown >> 20} MiB; {MAX_BYTES >> 20} MiB are allowed"


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


# What may lie where a file is expected -------------------------------------------------------------------------------

NOISE = np.random.default_rng(0).bytes(5000)

Plant = Callable[[Path, Path], None]
"""Makes something at the first path. The second is a folder outside, to which it may lead."""


def sparse(path: Path, start: bytes = b"") -> None:
    """A file of 200 GB that takes no space."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(SPARSE_BYTES)


def _folder(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / "inside").write_bytes(b"a file of a folder that is not expected")


def _bytes(data: bytes) -> Plant:
    def write(path: Path, outside: Path) -> None:
        path.write_bytes(data)

    return write


PLANTS: Mapping[str, Plant] = {
    "pipe": lambda path, outside: os.mkfifo(path),
    "socket": lambda path, outside: os.mknod(path, stat.S_IFSOCK | 0o600),
    "device": lambda path, outside: path.symlink_to("/dev/zero"),
    "folder": _folder,
    "sparse": lambda path, outside: sparse(path),
    "loop": lambda path, outside: path.symlink_to(path.name),
    "link to a file": lambda path, outside: path.symlink_to(outside / "file"),
    "link to a folder": lambda path, outside: path.symlink_to(outside / "folder"),
    "empty": _bytes(b""),
    "noise": _bytes(NOISE),
    "no text": _bytes(b"\xff\xfe\x00" * 100),
    "other JSON": _bytes(b'{"a": [1, {"b": null}]}\n'),
    "list": _bytes(b"[]\n"),
    "deep JSON": _bytes(b"[" * 100_000 + b"\n"),
}


def make_outside(folder: Path) -> Path:
    """What links out of a dataset lead to."""
    (folder / "folder").mkdir(parents=True)
    for name in ("file", "folder/file"):
        (folder / name).write_bytes(b"of somebody else")
    return folder
