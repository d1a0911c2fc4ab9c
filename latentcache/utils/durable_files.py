"""Files that are either whole or absent: written as a sibling, synced, then renamed into place."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

from latentcache.errors import ReadOnlyError, StorageFullError, StoreError, UnsafeStoreError
from latentcache.utils import file_locks

TEMPORARY_SUFFIX = ".tmp"
REBUILD = "run `latentcache rebuild`"
"""The step that restores most of a cache."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_IN_THE_WAY = {errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENXIO}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}

logger = logging.getLogger("latentcache")
_publishing = threading.Lock()
"""Held between the look whether a file is there and the renaming."""


@contextmanager
def typed_errors(path: Path, num_bytes: int) -> Iterator[None]:
    """Turn the operating system's refusals to write `path` into StorageFullError, ReadOnlyError or StoreError.

    UnsafeStoreError: a link, a folder, a file or a pipe lies there that latentcache did not make.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFullError(path, num_bytes) from error
        if error.errno in _FORBIDDEN:
            raise ReadOnlyError(path, f"cannot be written: {error.strerror}") from error
        if error.errno in _IN_THE_WAY:
            detail = f"cannot be written: {error.strerror}. Remove what is there and run the same command."
            raise UnsafeStoreError(path, detail) from error
        raise StoreError(
            f"{path}: cannot be written: {error}. Fix the file system and run the same command."
        ) from error


def unreadable(path: Path | str, error: Exception) -> StoreError:
    """The error for a file that cannot be read now, for a reason that may pass: rights, descriptors, memory, a disk."""
    return StoreError(f"{path}: cannot be read now: {error}. It is left as it is: fix the cause and try again.")


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """Turn what is left of the operating system's errors about files below `path` into StoreError."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, and make their names durable."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all bytes of `data`: `os.write` may write a part."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@contextmanager
def sealed_file(path: Path, num_bytes: int, *, is_new: bool = False) -> Iterator[int]:
    """Yield the descriptor of a temporary sibling, which becomes `path`, durably. An error leaves nothing.

    `num_bytes` is the size of the file, for the message of StorageFullError. With `is_new` a file that is there is not
    replaced by any thread: FileExistsError.
    """
    is_there = False
    with typed_errors(path, num_bytes):
        fd, temporary = _locked_sibling(path)
        try:
            yield fd
            os.fsync(fd)
            with _publishing if is_new else nullcontext():
                is_there = is_new and path.exists()
                if not is_there:
                    os.rename(temporary, path)
            if is_there:
                temporary.unlink()
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            unlock_and_close(fd)
        sync_folder(path.parent)
    if is_there:
        raise FileExistsError(path)


def write_sealed(path: Path, data: bytes) -> None:
    """Write `data` to `path`, durably; a file that exists is replaced as a whole. The mode follows the umask.

    Raises StorageFullError, ReadOnlyError or another StoreError, and the file is as it was.
    """
    with sealed_file(path, len(data)) as fd:
        write_all(fd, data)


def _locked_sibling(path: Path) -> tuple[int, Path]:
    while True:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}")
        fd = os.open(temporary, file_locks.OPEN_FLAGS | os.O_EXCL, 0o666)
        try:
            file_locks.take(fd, wait=True)
            # A sweep may have come between open and lock, and removed the name.
            if temporary.exists():
                return fd, temporary
        except BaseException:
            unlock_and_close(fd)
            temporary.unlink(missing_ok=True)
            raise
        unlock_and_close(fd)


def remove_whole(path: Path) -> None:
    """Remove a file, a link (not what it names) or a folder, if it is there. StoreError when that cannot be done."""
    with typed_errors(path, 0):
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
        # Renamed first: another process must never see half of it.
        aside = path.with_name(f"{path.name}.removed-{uuid.uuid4().hex[:8]}")
        path.rename(aside)
        shutil.rmtree(aside)


def unlock_and_close(fd: int) -> None:
    """Release the lock on a descriptor, and close it."""
    # Closing alone is not enough: a child that was forked meanwhile has the same lock until it exits.
    try:
        with suppress(OSError):  # a disk that fails; closing is what is left then
            file_locks.release(fd)
    finally:
        os.close(fd)


def sweep_temporaries(folder: Path) -> int:
    """Remove the temporary files in `folder` whose writer is dead, and count them. A live writer has a lock.

    Files that cannot be listed or removed stay, with a warning.
    """
    num_removed = 0
    try:
        names = [n for n in os.listdir(folder) if n.startswith(".") and n.endswith(TEMPORARY_SUFFIX)]
    except OSError as error:
        logger.warning("%s: not searched for half-written files: %s", folder, error)
        return 0
    for name in names:
        try:
            fd = os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("%s: left alone: %s", folder / name, error)
            continue
        try:
            if file_locks.take(fd):
                (folder / name).unlink(missing_ok=True)
                num_removed += 1
        except OSError as error:
            logger.warning("%s: left alone: %s", folder / name, error)
        finally:
            os.close(fd)
    return num_removed


def open_regular(path: Path, remedy: str = REBUILD) -> int:
    """Open a regular file for reading. UnsafeStoreError for pipes, devices and folders: `remedy` is the next step.

    FileNotFoundError is passed on; any other refusal is a plain StoreError, which does not mean that the file's bytes
    are damaged. The caller closes the descriptor.
    """
    try:
        # O_NONBLOCK: opening a pipe must not wait for its other end.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _IN_THE_WAY:
            raise UnsafeStoreError(path, f"is no file: {error.strerror}; remove it, then {remedy}") from error
        if isinstance(error, FileNotFoundError):
            raise
        raise unreadable(path, error) from error
    try:
        mode = os.fstat(fd).st_mode
    except OSError as error:
        os.close(fd)
        raise unreadable(path, error) from error
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise UnsafeStoreError(path, f"is not a regular file; remove it, then {remedy}")
    return fd


@contextmanager
def regular_file(path: Path, max_bytes: int, remedy: str = REBUILD) -> Iterator[BinaryIO]:
    """A regular file, open for reading. As `open_regular`; UnsafeStoreError also for one of more than `max_bytes`.

    An OSError of the block is a plain StoreError: the file cannot be read now.
    """
    fd = open_regular(path, remedy)
    try:
        file = open(fd, "rb")  # noqa: SIM115 - the block below closes it
    except OSError as error:  # it asks the system what kind of file it is
        os.close(fd)
        raise unreadable(path, error) from error
    with file:
        try:
            num_bytes = os.fstat(fd).st_size
            if num_bytes > max_bytes:
                detail = f"has {num_bytes:,} bytes, {max_bytes:,} are allowed; remove it, then {remedy}"
                raise UnsafeStoreError(path, detail)
            yield file
        except OSError as error:
            raise unreadable(path, error) from error


def read_regular(path: Path, max_bytes: int, remedy: str = REBUILD) -> bytes:
    """The bytes of a regular file of at most `max_bytes`: see `regular_file`."""
    with regular_file(path, max_bytes, remedy) as file:
        return file.read(max_bytes)
