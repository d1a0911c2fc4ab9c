"""Arrays in `.npz` files of other programs: bounded, checked, and never unpickled."""

from __future__ import annotations

import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO

import numpy as np

from latentcache.errors import ForeignFileRefused
from latentcache.interop.torch_files import opened

MAX_MEMBER_BYTES = 256 << 20
"""A latent of 16,384 x 16,384 pixels has 67 MB in float32."""
MAX_MEMBERS = 1000
_MAX_HEADER_BYTES = 10_000
_FAULTS = (
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError, EOFError, OSError),
    *(ValueError, KeyError, OverflowError, struct.error),
    *(TypeError, SyntaxError, RuntimeError, NotImplementedError, RecursionError, MemoryError),
    UserWarning,  # numpy's, of a header that it has to guess at; an exception where warnings are errors
)
"""What zipfile and numpy raise on damaged input."""


class NpzFile:
    """An open npz file: shapes are read from the headers, an array only when `read` is called."""

    def __init__(self, path: Path, archive: zipfile.ZipFile):
        self._path, self._archive = path, archive
        names = [name for name in archive.namelist() if name.endswith(".npy")]
        if len(names) > MAX_MEMBERS or len(set(names)) != len(names):
            raise ForeignFileRefused(path, "corrupt", f"it has {len(names)} members, too many or of the same name")
        self.names = frozenset(name.removesuffix(".npy") for name in names)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array, from its header. Raises ForeignFileRefused."""
        with self._member(name) as file:
            return self._header(name, file)[0]

    def read(self, name: str) -> np.ndarray:
        """An array, writable and C-contiguous, whose bytes have the checksum of the zip. Raises ForeignFileRefused."""
        with self._member(name) as file:
            shape, fortran, dtype = self._header(name, file)
            num_bytes = math.prod(shape) * dtype.itemsize
            if num_bytes > MAX_MEMBER_BYTES:
                detail = f"{name} is {dtype} {list(shape)}, {num_bytes:,} bytes; {MAX_MEMBER_BYTES:,} are allowed"
                raise ForeignFileRefused(self._path, "corrupt", detail)
            # One byte more than there should be: only at the end does zipfile compare the checksum.
            data = file.read(num_bytes + 1)
            if len(data) != num_bytes:
                detail = f"{name} holds other than the {num_bytes:,} bytes that its header says"
                raise ForeignFileRefused(self._path, "truncated" if len(data) < num_bytes else "corrupt", detail)
        array = np.frombuffer(bytearray(data), dtype=dtype).reshape(shape, order="F" if fortran else "C")
        return np.ascontiguousarray(array, dtype=dtype.newbyteorder("="))

    @contextmanager
    def _member(self, name: str) -> Iterator[IO[bytes]]:
        try:
            with self._archive.open(f"{name}.npy") as file:
                yield file
        except KeyError as error:
            raise ForeignFileRefused(self._path, "corrupt", f"it has no {name}") from error
        except _FAULTS as error:
            raise ForeignFileRefused(self._path, "corrupt", f"{name}: {error}") from error

    def _header(self, name: str, file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
        version = np.lib.format.read_magic(file)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in readers:
            raise ForeignFileRefused(self._path, "corrupt", f"{name} has the npy version {version}")
        shape, fortran, dtype = readers[version](file, max_header_size=_MAX_HEADER_BYTES)
        if dtype.kind not in "fiu" or any(side < 0 for side in shape):
            detail = f"{name} is {dtype} {list(shape)}, which is no array of numbers (objects are never unpickled)"
            raise ForeignFileRefused(self._path, "corrupt", detail)
        return shape, fortran, dtype


@contextmanager
def open_npz(path: Path) -> Iterator[NpzFile]:
    """An npz file, for the block. Raises ForeignFileRefused."""
    with opened(path) as (fd, num_bytes):
        if num_bytes == 0:
            raise ForeignFileRefused(path, "empty", "the file has no bytes")
        try:
            with open(fd, "rb", closefd=False) as file, zipfile.ZipFile(file) as archive:
                yield NpzFile(path, archive)
        except _FAULTS as error:
            raise ForeignFileRefused(path, "corrupt", f"it is not a whole zip file: {error}") from error


def npz_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The bytes that `numpy.savez` writes for these arrays: a zip, uncompressed."""
    file = BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]  # the stub takes the arrays for `allow_pickle`
    return file.getvalue()
