"""Atomic, durable files: written to a temporary sibling, synced, then renamed into place."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from latentcache.errors import ReadOnlyError, StorageFullError, StoreError, UnsafeStoreError
from latentcache.utils import file_locks

TEMPORARY_SUFFIX = ".tmp"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}

logger = logging.getLogger("latentcache")


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with `~` expanded. `~USER` of an unknown user stays as it is, where `Path.expanduser` would raise."""
    return Path(os.path.expanduser(path))


@contextmanager
def typed_errors(path: Path, num_bytes: int) -> Iterator[None]:
    """Turn an OSError on writing `path` into StorageFullError, ReadOnlyError or StoreError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFullError(path, num_bytes) from error
        if error.errno in _FORBIDDEN:
            raise ReadOnlyError(path, f"cannot be written: {error.strerror}") from error
        raise StoreError(f"{path}: cannot be written: {error}. Fix the cause, then run the command again.") from error


def unreadable(path: Path | str, error: Exception) -> StoreError:
    """The error for a file that cannot be read now. The cause may be temporary: permissions, descriptors, memory."""
    return StoreError(f"{path}: cannot be read now: {error}. It was not changed: fix the cause and try again.")


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """Turn any remaining OSError about files below `path` into StoreError."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, durably."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable (fsync). A no-op on Windows, which does that itself."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all bytes of `data`, since `os.write` may write only a part of them."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@contextmanager
def sealed_file(path: Path, num_bytes: int) -> Iterator[int]:
    """Yield the descriptor of a temporary file that becomes `path` durably, or is removed after an error.

    `num_bytes` is the size of the file, for the message of StorageFullError.
    """
    with typed_errors(path, num_bytes):
        fd, temporary = _locked_sibling(path)
        try:
            with ExitStack() as opened:
                opened.callback(unlock_and_close, fd, os.getpid())
                yield fd
                os.fsync(fd)
                if os.name == "nt":
                    opened.close()  # Windows cannot rename an open file
                os.replace(temporary, path)
        except BaseException:
            with suppress(PermissionError):  # Windows keeps mapped files; the next sweep removes this one
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def write_sealed(path: Path, data: bytes) -> None:
    """Write `data` to `path` durably, atomically replacing an existing file. The mode follows the umask.

    StorageFullError, ReadOnlyError or another StoreError leaves an existing file as it was.
    """
    with sealed_file(path, len(data)) as fd:
        write_all(fd, data)


def _locked_sibling(path: Path) -> tuple[int, Path]:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}")
    fd = os.open(temporary, file_locks.OPEN_FLAGS | os.O_EXCL, 0o666)
    try:
        file_locks.take(fd, wait=True)
        if temporary.exists():
            return fd, temporary
    except BaseException:
        os.close(fd)
        temporary.unlink(missing_ok=True)
        raise
    os.close(fd)  # a sweep removed the file between open and lock
    return _locked_sibling(path)


def remove_whole(path: Path) -> None:
    """Remove a file, a link or a folder if it exists. StoreError if that fails."""
    with typed_errors(path, 0):
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
        # Renamed first, so that no process sees a half-removed folder.
        aside = path.with_name(f"{path.name}.removed-{uuid.uuid4().hex[:8]}")
        path.rename(aside)
        shutil.rmtree(aside)


def unlock_and_close(fd: int, owner: int, at: int | None = file_locks.FAR) -> None:
    """Release the lock on byte `at` of an open file (None: all locks), then close it. `owner` took the lock.

    Closing alone is not enough, because a child that was forked meanwhile shares the lock until it exits. The child
    itself only closes: it must not release its parent's lock.
    """
    try:
        if os.getpid() == owner:
            with suppress(OSError):  # the disk fails: then closing must do
                file_locks.release(fd, at)
    finally:
        os.close(fd)


def sweep_temporaries(folder: Path, of: str = "") -> None:
    """Remove the temporary files in `folder` that no live writer has locked; `of` restricts that to one file's.

    Files that cannot be listed or removed stay, with a warning.
    """
    try:
        start = f".{of}." if of else "."
        names = [name for name in os.listdir(folder) if name.startswith(start) and name.endswith(TEMPORARY_SUFFIX)]
    except OSError as error:
        logger.warning("%s: cannot look for half-written files: %s", folder, error)
        return
    for path in map(folder.joinpath, names):
        try:
            with open(path, "r+b") as file:
                is_dead = file_locks.take(file.fileno())
                if is_dead and os.name != "nt":
                    path.unlink()  # while locked, since a writer may just have opened it
            if is_dead:
                path.unlink(missing_ok=True)  # Windows cannot remove an open file
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("%s: a half-written file was not removed: %s", path, error)


def open_to_read(path: Path) -> int:
    """Open a file for reading and return its descriptor, which the caller must close.

    FileNotFoundError propagates; any other OSError becomes a plain StoreError, which says nothing about the content.
    """
    try:
        return os.open(path, file_locks.READ_FLAGS)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error


def read_small_file(path: Path, max_bytes: int, remedy: str) -> bytes:
    """The bytes of a file. UnsafeStoreError if it has more than `max_bytes`, with `remedy` as the next step.

    FileNotFoundError propagates; any other OSError becomes a plain StoreError: the file cannot be read now.
    """
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, file_locks.READ_FLAGS)) as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) > max_bytes:
        raise UnsafeStoreError(path, f"has more than {max_bytes:,} bytes, the limit; remove it, then {remedy}")
    return data
