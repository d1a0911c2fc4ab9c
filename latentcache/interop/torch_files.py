"""Files that other trainers wrote, `torch.save` files above all: read within bounds, and nothing in them is run.

The bytes are checked before torch reads them. torch compares no checksums, so that a flipped bit gives another tensor;
it inflates compressed members, however large they become; and before 2.13 it does not compare the sizes of storages in
the pickle with those of the members.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from latentcache.errors import ForeignFileRefused

MAX_FILE_BYTES = 256 << 20
"""A latent of 16,384 x 16,384 pixels has 67 MB in float32."""

MAX_PICKLE_BYTES = 4 << 20
"""Bytes of a file in addition to the values of its tensors: each can become an object of some 200 bytes."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ZIP = b"PK\x03\x04"
_GZIP = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 20
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, struct.error, OSError, EOFError, KeyError, ValueError, OverflowError),
    *(NotImplementedError, RuntimeError, MemoryError),
)
"""What zipfile raises on damaged input. OverflowError: an offset beyond 64 bits."""


@contextmanager
def opened(path: str | Path) -> Iterator[tuple[int, int]]:
    """A regular file's descriptor, for reading, and its size in bytes. Raises ForeignFileRefused."""
    try:
        # Opening a pipe must not wait for its other end.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ForeignFileRefused(path, "missing", "there is no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ForeignFileRefused(path, "unreadable", str(error)) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ForeignFileRefused(path, "unreadable", "not a regular file")
        yield fd, status.st_size
    except OSError as error:
        raise ForeignFileRefused(path, "unreadable", str(error)) from error
    finally:
        os.close(fd)


def read_at(fd: int, offset: int, num_bytes: int) -> bytes:
    """Bytes of a file; fewer where it ends. Raises OSError."""
    parts = []
    while num_bytes > 0 and (part := os.pread(fd, num_bytes, offset)):
        parts.append(part)
        offset, num_bytes = offset + len(part), num_bytes - len(part)
    return b"".join(parts)


def read_file(path: str | Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """All bytes of a regular file: some, and at most `max_bytes`. Raises ForeignFileRefused."""
    with opened(path) as (fd, num_bytes):
        if num_bytes > max_bytes:
            raise ForeignFileRefused(
                path, "corrupt", f"it has {num_bytes:,} bytes; such a file has {max_bytes:,} at most"
            )
        data = read_at(fd, 0, num_bytes)
    if not data:
        raise ForeignFileRefused(path, "empty", "the file has no bytes")
    return data


def is_gzip(data: bytes) -> bool:
    """Whether these bytes begin like a gzip file."""
    return data.startswith(_GZIP)


def gunzip(data: bytes, path: str | Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The bytes inside. Raises ForeignFileRefused, also if they are more than `max_bytes`."""
    parts, num_bytes = [], 0
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            while part := file.read(_CHUNK_BYTES):
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    raise ForeignFileRefused(path, "corrupt", f"it unpacks to more than {max_bytes:,} bytes")
                parts.append(part)
    except EOFError as error:
        raise ForeignFileRefused(path, "truncated", "the gzip data ends early") from error
    except (OSError, zlib.error, struct.error) as error:
        raise ForeignFileRefused(path, "corrupt", f"gzip: {error}") from error
    return b"".join(parts)


def load_torch(data: bytes, path: str | Path, max_pickle_bytes: int = MAX_PICKLE_BYTES) -> Any:
    """What `torch.save` (of torch 1.6 or later) wrote: tensors on the CPU, and plain data.

    Only torch's restricted reader is used. Raises ForeignFileRefused for files that are damaged, are compressed, need
    code to be run, have tensors larger than their bytes, or a pickle larger than `max_pickle_bytes`.
    """
    sizes = _member_sizes(data, path, max_pickle_bytes)
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    # torch's reader raises many kinds of errors, which have no common class. After each the file cannot be used.
    except Exception as error:
        # torch wraps the reason in advice to read the file without restrictions, or with fewer.
        inner = error.__context__ if isinstance(error.__context__, type(error)) else error
        detail = f"torch's restricted reader: {type(error).__name__}: {inner}".partition(". Please use")[0]
        raise ForeignFileRefused(path, "corrupt", detail.partition("\n")[0]) from error
    for tensor in _tensors(content):
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise ForeignFileRefused(path, "corrupt", f"it holds a {tensor.layout} tensor on {tensor.device}")
        if tensor.untyped_storage().nbytes() not in sizes:
            raise ForeignFileRefused(path, "corrupt", "a tensor's storage has another size than the file says")
    return content


def torch_bytes(content: Any) -> bytes:
    """The bytes that `torch.save` writes for tensors and plain data, and that `load_torch` reads."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def tensor_in(value: object, name: str, path: str | Path, *, ndim: int) -> torch.Tensor:
    """`value` as a tensor of float32, float16 or bfloat16 with memory of its own. Raises ForeignFileRefused."""
    if type(value) is not torch.Tensor:
        raise ForeignFileRefused(path, "corrupt", f"{name} is a {type(value).__name__}; it must be a tensor")
    shape = tuple(value.shape)
    if value.dtype not in _DTYPES or len(shape) != ndim or 0 in shape:
        allowed = "float32, float16 or bfloat16"
        raise ForeignFileRefused(
            path, "corrupt", f"{name} is {value.dtype} {list(shape)}; it must be {allowed} with {ndim} dimensions"
        )
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise ForeignFileRefused(path, "corrupt", f"{name} of shape {list(shape)} has more values than the file")
    return value.detach().clone(memory_format=torch.contiguous_format)


def _member_sizes(data: bytes, path: str | Path, max_pickle_bytes: int) -> set[int]:
    """The sizes of the zip's members, after each was read and compared with its checksum."""
    if not data.startswith(_ZIP):
        raise ForeignFileRefused(path, "corrupt", f"it begins with {data[:4]!r}, which no torch.save file does")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise ForeignFileRefused(path, "corrupt", "it is compressed, which torch.save does not do")
            if sum(member.file_size for member in members) > len(data):
                raise ForeignFileRefused(path, "corrupt", "its members overlap")
            if (damaged := archive.testzip()) is not None:
                raise ForeignFileRefused(path, "corrupt", f"{damaged} does not have its checksum")
            for member in members:
                if member.filename.lower().endswith(".pkl"):  # torch's zip reader ignores case
                    _check_pickle(archive.read(member), path, max_pickle_bytes)
    except ForeignFileRefused:
        raise
    except _ZIP_ERRORS as error:
        # The directory of a zip is at its end.
        reason = "truncated" if "not a zip file" in str(error) else "corrupt"
        raise ForeignFileRefused(path, reason, f"zip: {error}") from error
    return {member.file_size for member in members}


def _check_pickle(pickled: bytes, path: str | Path, max_bytes: int) -> None:
    """Raises ForeignFileRefused for what would take far more memory than the file has."""
    if len(pickled) > max_bytes:
        detail = f"its pickle has {len(pickled):,} bytes; such a file has {max_bytes:,} at most"
        raise ForeignFileRefused(path, "corrupt", detail)
    # torch's reader allows a bytearray of any length. A pickle can name its class in one way only, which ends so.
    if b"\nbytearray\n" in pickled:
        raise ForeignFileRefused(path, "corrupt", "it holds a bytearray, which no such file does")


def _tensors(content: Any) -> Iterator[torch.Tensor]:
    """All tensors in plain data. A pickle can hold a list that holds itself."""
    pending, seen = [content], set()
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (dict, list, tuple, set)) and id(value) not in seen:
            seen.add(id(value))
            pending += value.values() if isinstance(value, dict) else value
