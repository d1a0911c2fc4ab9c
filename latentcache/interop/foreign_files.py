"""Files that other trainers wrote, `torch.save` files and `.npz` files: read within bounds, and nothing in them is run.

The bytes are checked before torch reads them. torch compares no checksums, so that a flipped bit gives another tensor;
it inflates compressed members, however large they become; and before 2.13 it does not compare the sizes of storages in
the pickle with those of the members.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import stat
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from latentcache.errors import ForeignFileRefused

MAX_FILE_BYTES = 256 << 20
"""A latent of 16,384 x 16,384 pixels has 67 MB in float32."""

MAX_PICKLE_BYTES = 4 << 20
"""Bytes of a file in addition to the values of its tensors: each can become an object of some 200 bytes."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_ARRAYS = 1000
_MAX_HEADER_BYTES = 10_000
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError, EOFError, OSError),
    *(ValueError, KeyError, OverflowError, TypeError, SyntaxError),
    *(RuntimeError, NotImplementedError, RecursionError, MemoryError),
    UserWarning,  # numpy's, of a header that it has to guess at; an exception where warnings are errors
)
"""What zipfile, and numpy's reader of headers, raise on damaged input. OverflowError: an offset beyond 64 bits."""


def corrupt(path: str | Path, detail: str) -> ForeignFileRefused:
    """The refusal of a file that is damaged, or is not what its format says."""
    return ForeignFileRefused(path, "corrupt", detail)


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
            raise corrupt(path, f"it has {num_bytes:,} bytes; such a file has {max_bytes:,} at most")
        data = read_at(fd, 0, num_bytes)
    if not data:
        raise ForeignFileRefused(path, "empty", "the file has no bytes")
    return data


def gunzip(data: bytes, path: str | Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The bytes inside. Raises ForeignFileRefused, also if they are more than `max_bytes`."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            unpacked = file.read(max_bytes + 1)
    except EOFError as error:
        raise ForeignFileRefused(path, "truncated", "the gzip data ends early") from error
    except (OSError, zlib.error, struct.error) as error:
        raise corrupt(path, f"gzip: {error}") from error
    if len(unpacked) > max_bytes:
        raise corrupt(path, f"it unpacks to more than {max_bytes:,} bytes")
    return unpacked


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
        raise corrupt(path, detail.partition("\n")[0]) from error
    for tensor in _tensors(content):
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise corrupt(path, f"it holds a {tensor.layout} tensor on {tensor.device}")
        if tensor.untyped_storage().nbytes() not in sizes:
            raise corrupt(path, "a tensor's storage has another size than the file says")
    return content


def torch_bytes(content: Any) -> bytes:
    """The bytes that `torch.save` writes for tensors and plain data, and that `load_torch` reads."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def tensor_in(value: object, name: str, path: str | Path, *, ndim: int | None) -> torch.Tensor:
    """`value` as a tensor of float32, float16 or bfloat16 with memory of its own. Raises ForeignFileRefused.

    It has `ndim` dimensions; None, as for embeddings: 2 or 3.
    """
    if type(value) is not torch.Tensor:
        raise corrupt(path, f"{name} is a {type(value).__name__}; it must be a tensor")
    shape = tuple(value.shape)
    if value.dtype not in _DTYPES or len(shape) not in ((2, 3) if ndim is None else (ndim,)) or 0 in shape:
        allowed = f"float32, float16 or bfloat16 with {'2 or 3' if ndim is None else ndim} dimensions"
        raise corrupt(path, f"{name} is {value.dtype} {list(shape)}; it must be {allowed}")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise corrupt(path, f"{name} of shape {list(shape)} has more values than the file")
    return value.detach().clone(memory_format=torch.contiguous_format)


def _member_sizes(data: bytes, path: str | Path, max_pickle_bytes: int) -> set[int]:
    """The sizes of the zip's members, after each was read and compared with its checksum."""
    if not data.startswith(b"PK\x03\x04"):
        raise corrupt(path, f"it begins with {data[:4]!r}, which no torch.save file does")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise corrupt(path, "it is compressed, which torch.save does not do")
            if sum(member.file_size for member in members) > len(data):
                raise corrupt(path, "its members overlap")
            if (damaged := archive.testzip()) is not None:
                raise corrupt(path, f"{damaged} does not have its checksum")
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
    """Refuse what would take far more memory than the file has."""
    if len(pickled) > max_bytes:
        raise corrupt(path, f"its pickle has {len(pickled):,} bytes; such a file has {max_bytes:,} at most")
    # torch's reader allows a bytearray of any length. A pickle can name its class in one way only, which ends so.
    if b"\nbytearray\n" in pickled:
        raise corrupt(path, "it holds a bytearray, which no such file does")


def _tensors(content: Any) -> Iterator[torch.Tensor]:
    """All tensors in plain data. A pickle can hold a list that holds itself, or another very often."""
    pending, seen = [content], set()
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (dict, list, tuple, set)) and id(value) not in seen:
            seen.add(id(value))
            pending += value.values() if isinstance(value, dict) else value


# npz and npy


class NpzFile:
    """An open npz file: shapes are read from the headers, an array only when `read` is called."""

    def __init__(self, path: Path, archive: zipfile.ZipFile):
        self._path, self._archive = path, archive
        names = [name for name in archive.namelist() if name.endswith(".npy")]
        if len(names) > _MAX_ARRAYS or len(set(names)) != len(names):
            raise corrupt(path, f"it has {len(names)} members, too many or of the same name")
        self.names = frozenset(name.removesuffix(".npy") for name in names)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array, from its header. Raises ForeignFileRefused."""
        with self._member(name) as file:
            return _npy_header(file, name, self._path)[0]

    def read(self, name: str) -> np.ndarray:
        """An array, writable and C-contiguous, whose bytes have the checksum of the zip. Raises ForeignFileRefused."""
        with self._member(name) as file:
            return _npy_array(file, name, self._path)

    @contextmanager
    def _member(self, name: str) -> Iterator[IO[bytes]]:
        try:
            with self._archive.open(f"{name}.npy") as file:
                yield file
        except KeyError as error:
            raise corrupt(self._path, f"it has no {name}") from error
        except _ZIP_ERRORS as error:
            raise corrupt(self._path, f"{name}: {error}") from error


def _npy_header(file: IO[bytes], name: str, path: str | Path) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise corrupt(path, f"{name} has the npy version {version}")
    shape, fortran, dtype = readers[version](file, max_header_size=_MAX_HEADER_BYTES)
    # torch has no wider numbers.
    if dtype.kind not in "fiub" or dtype.itemsize > 8 or any(side < 0 for side in shape):
        allowed = "which is no array of numbers of at most 8 bytes (objects are never unpickled)"
        detail = f"{name} is {dtype} {list(shape)}, {allowed}"
        raise corrupt(path, detail)
    return shape, fortran, dtype


def _npy_array(file: IO[bytes], name: str, path: str | Path) -> np.ndarray:
    shape, fortran, dtype = _npy_header(file, name, path)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > MAX_FILE_BYTES:
        size = f"{num_bytes:,} bytes; {MAX_FILE_BYTES:,} are allowed"
        raise corrupt(path, f"{name} is {dtype} {list(shape)}, {size}")
    # One byte more than there should be: only at the end does zipfile compare the checksum.
    data = file.read(num_bytes + 1)
    if len(data) != num_bytes:
        detail = f"{name} holds other than the {num_bytes:,} bytes that its header says"
        raise ForeignFileRefused(path, "truncated" if len(data) < num_bytes else "corrupt", detail)
    array = np.frombuffer(bytearray(data), dtype=dtype).reshape(shape, order="F" if fortran else "C")
    # It makes a list of one number of a single number.
    return np.ascontiguousarray(array, dtype=dtype.newbyteorder("=")).reshape(shape)


def npy_array(data: bytes, name: str, path: str | Path) -> np.ndarray:
    """The array of numbers in the bytes of an npy file, writable and C-contiguous. Raises ForeignFileRefused.

    `name` and `path` say in messages where the bytes were.
    """
    try:
        return _npy_array(io.BytesIO(data), name, path)
    except ForeignFileRefused:
        raise
    except _ZIP_ERRORS as error:
        raise corrupt(path, f"{name} is no whole npy file: {error}") from error


def npy_bytes(array: np.ndarray) -> bytes:
    """The bytes that `numpy.save` writes for an array of numbers."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


@contextmanager
def open_npz(path: Path) -> Iterator[NpzFile]:
    """An npz file, for the block. Raises ForeignFileRefused."""
    with opened(path) as (fd, num_bytes):
        if num_bytes == 0:
            raise ForeignFileRefused(path, "empty", "the file has no bytes")
        try:
            with open(fd, "rb", closefd=False) as file, zipfile.ZipFile(file) as archive:
                yield NpzFile(path, archive)
        except _ZIP_ERRORS as error:
            raise corrupt(path, f"it is not a whole zip file: {error}") from error


def npz_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The bytes that `numpy.savez` writes for these arrays: a zip, uncompressed."""
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]  # the stub takes the arrays for `allow_pickle`
    return file.getvalue()
