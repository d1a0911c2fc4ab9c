"""What an attack may cost, what may lie where a file is expected, and that nothing else changes."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import resource
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

STATUS = Path("/proc/self/status")
MAX_S = 10.0
MAX_BYTES = 256 << 20
STUCK_S = 120
SPARSE_BYTES = 200 << 30
GUARD_BYTES = 4 << 30
"""Address space: allocators reserve more than they use."""


class TooLong(BaseException):
    """The time is up. No OSError, as TimeoutError is: what handles the system's errors would take it for one."""


@contextmanager
def within_limits(max_s: float = MAX_S, max_bytes: int = MAX_BYTES, *, max_wait_s: float = MAX_S) -> Iterator[None]:
    """AssertionError for a block that computes or takes longer, or whose resident memory grew more meanwhile.

    `max_wait_s` is that by the clock: more than `max_s` where other programs may take the processor.

    For the main thread. Memory is measured on Linux. What the block asks for beyond GUARD_BYTES is a MemoryError, so
    that the machine survives it. A block that cannot be interrupted ends the process after STUCK_S, with a traceback.
    """
    is_late, late = False, f"it computed for more than {max_s:g} s, or took more than {max_wait_s:g} s"

    def stop(*_: object) -> None:
        nonlocal is_late
        is_late = True
        raise TooLong

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)}
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if STATUS.exists():
        resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + GUARD_BYTES, hard))
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # what was free before must count when it is used
    before = _reset_peak()
    faulthandler.dump_traceback_later(STUCK_S, exit=True, file=sys.__stderr__ or sys.stderr)
    signal.setitimer(signal.ITIMER_REAL, max_wait_s)
    signal.setitimer(signal.ITIMER_PROF, max_s)
    try:
        yield
    except TooLong as error:
        raise AssertionError(late) from error
    finally:
        for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        faulthandler.cancel_dump_traceback_later()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        grown = status_bytes("VmHWM") - before
    assert not is_late, f"{late}, and went on"
    assert grown <= max_bytes, f"memory grew by {grown >> 20} MiB; {max_bytes >> 20} MiB are allowed"


def _reset_peak() -> int:
    """Let the peak of the resident memory begin at what it is now, and return that."""
    if STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    """A figure of this process since its program began; 0 where the system has none, and then only time is limited.

    VmHWM is the peak of its memory. getrusage counts what its parent had when it was started, too.
    """
    if not STATUS.exists():
        return 0
    found = re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


@contextmanager
def unchanged(*folders: Path) -> Iterator[None]:
    """Nothing in these folders is made, removed or changed by the block."""
    before = [_tree(folder) for folder in folders]
    yield
    for folder, tree in zip(folders, before, strict=True):
        now = _tree(folder)
        changed = sorted(name for name in now.keys() | tree.keys() if now.get(name) != tree.get(name))
        assert not changed, f"changed outside: {changed[:5]}"


def _tree(folder: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        status = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(status.st_mode) and status.st_size < 1 << 20 else b""
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino, status.st_nlink, data)
    return found


# What may lie where a file is expected -------------------------------------------------------------------------------

NOISE = np.random.default_rng(0).bytes(5000)

Plant = Callable[[Path, Path], None]
"""Makes something at the first path. The second is a folder outside, to which it may lead."""


def sparse(path: Path, start: bytes = b"") -> None:
    """A file of 200 GB that takes no space."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(SPARSE_BYTES)


def _pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path, outside: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def _device(path: Path, outside: Path) -> None:
    path.symlink_to("/dev/zero")


def _folder(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / "inside").write_bytes(b"a file of a folder that is not expected")


def _loop(path: Path, outside: Path) -> None:
    path.symlink_to(path.name)


def _file_outside(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "file")


def _folder_outside(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "folder")


def _bytes(data: bytes) -> Plant:
    def write(path: Path, outside: Path) -> None:
        path.write_bytes(data)

    return write


PLANTS: Mapping[str, Plant] = {
    "pipe": _pipe,
    "socket": _socket,
    "device": _device,
    "folder": _folder,
    "sparse": lambda path, outside: sparse(path),
    "loop": _loop,
    "link to a file": _file_outside,
    "link to a folder": _folder_outside,
    "empty": _bytes(b""),
    "noise": _bytes(NOISE),
    "no text": _bytes(b"\xff\xfe\x00" * 100),
    "other JSON": _bytes(b'{"a": [1, {"b": null}]}\n'),
    "list": _bytes(b"[]\n"),
    "deep JSON": _bytes(b"[" * 100_000 + b"\n"),
}


def make_outside(folder: Path) -> Path:
    """A folder that no attack may change: what links out of a cache or a dataset lead to. It looks like a cache's."""
    (folder / "folder" / "00").mkdir(parents=True)
    (folder / "file").write_bytes(b"precious")
    for name in ("file", "00/file", ".half.tmp", "00/.half.tmp", f"00/{'00' * 16}.safetensors", "photos.safetensors"):
        (folder / "folder" / name).write_bytes(b"of somebody else")
    return folder
