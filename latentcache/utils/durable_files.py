"""Files that are either whole or absent: written as a sibling, synced, then renamed into place."""

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
    """The path, of which `~` is the home directory. That of a user who is not known stays: Path's own method raises."""
    return Path(os.path.expanduser(path))


@contextmanager
def typed_errors(path: Path, num_bytes: int) -> Iterator[None]:
    """Turn the operating system's refusals to write `path` into StorageFullError, ReadOnlyError or StoreError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFullError(path, num_bytes) from error
        if error.errno in _FORBIDDEN:
            raise ReadOnlyError(path, f"cannot be written: {error.strerror}") from error
        raise StoreError(f"{path}: cannot be written: {error}. Fix the cause and run the same command.") from error


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
    """Make the names in a folder durable. Windows does that itself, and opens no folder."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY)
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
def sealed_file(path: Path, num_bytes: int) -> Iterator[int]:
    """Yield the descriptor of a temporary sibling, which becomes `path`, durably. An error leaves nothing.

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
                    opened.close()  # Windows renames no open file
                os.replace(temporary, path)
        except BaseException:
            with suppress(PermissionError):  # Windows removes no file that is mapped: the next sweep does
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def write_sealed(path: Path, data: bytes) -> None:
    """Write `data` to `path`, durably; a file that exists is replaced as a whole. The mode follows the umask.

    Raises StorageFullError, ReadOnlyError or another StoreError, and the file is as it was.
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
    os.close(fd)  # a sweep came between open and lock
    return _locked_sibling(path)


def remove_whole(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there. StoreError when that cannot be done."""
    with typed_errors(path, 0):
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
        # Renamed first: another process must never see half of it.
        aside = path.with_name(f"{path.name}.removed-{uuid.uuid4().hex[:8]}")
        path.rename(aside)
        shutil.rmtree(aside)


def unlock_and_close(fd: int, owner: int, at: int | None = file_locks.FAR) -> None:
    """Release the lock on a byte of an open file, or all with None, and close it. `owner` is the process that has it.

    Closing alone is not enough: a child that was forked meanwhile has the same lock until it exits. And such a child
    closes only: it must not release its parent's lock.
    """
    try:
        if os.getpid() == owner:
            with suppress(OSError):  # a disk that fails; closing is what is left then
                file_locks.release(fd, at)
    finally:
        os.close(fd)


def sweep_temporaries(folder: Path, of: str = "") -> None:
    """Remove the temporary files in `folder` whose writer is dead, or only those `of` a file. A live writer has a lock.

    Files that cannot be listed or removed stay, with a warning.
    """
    try:
        start = f".{of}." if of else "."
        names = [name for name in os.listdir(folder) if name.startswith(start) and name.endswith(TEMPORARY_SUFFIX)]
    except OSError as error:
        logger.warning("%s: not searched for half-written files: %s", folder, error)
        return
    for path in map(folder.joinpath, names):
        try:
            with open(path, "r+b") as file:
                is_dead = file_locks.take(file.fileno())
                if is_dead and os.name != "nt":
                    path.unlink()  # before the lock ends: a writer may have opened it just now
            if is_dead:
                path.unlink(missing_ok=True)  # Windows removes no open file
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("%s: left alone: %s", path, error)


def open_to_read(path: Path) -> int:
    """Open a file for reading, and return its descriptor, which the caller closes.

    FileNotFoundError is passed on; any other refusal is a plain StoreError, which does not mean that the file's bytes
    are damaged.
    """
    try:
        return os.open(path, file_locks.READ_FLAGS)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error


def read_small_file(path: Path, max_bytes: int, remedy: str) -> bytes:
    """The bytes of a file. UnsafeStoreError if it has more than `max_bytes`: `remedy` is the next step.

    FileNotFoundError is passed on; any other refusal is a plain StoreError: the file cannot be read now.
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
