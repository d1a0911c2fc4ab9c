"""Files that other trainers wrote: read within a size limit, and nothing in them is run."""

from __future__ import annotations

import gzip
import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from latentcache.dataset.samples import read_range
from latentcache.errors import ForeignFileRefused

MAX_FILE_BYTES = 256 << 20
"""A latent of 16,384 x 16,384 pixels has 67 MB in float32."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def corrupt(path: str | Path, detail: str) -> ForeignFileRefused:
    """The refusal of a file that is damaged, or is not what its format says."""
    return ForeignFileRefused(path, "corrupt", detail)


def read_file(path: str | Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """All bytes of a regular file: some, and at most `max_bytes`. Raises ForeignFileRefused."""
    try:
        data = read_range(str(path), 0, max_bytes + 1)
    except FileNotFoundError:
        raise ForeignFileRefused(path, "missing", "there is no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ForeignFileRefused(path, "unreadable", str(error)) from error
    if len(data) > max_bytes:
        raise corrupt(path, f"it has more than {max_bytes:,} bytes, which no such file has")
    if not data:
        raise ForeignFileRefused(path, "empty", "the file has no bytes")
    return data


def read_npz(path: Path) -> dict[str, torch.Tensor]:
    """The arrays of an npz file as tensors, by name. Raises ForeignFileRefused, also for text and structures."""
    data = read_file(path)
    _check_zip(data, path)
    with (
        _refusing(path, "numpy cannot read its arrays"),
        np.load(io.BytesIO(data), allow_pickle=False) as arrays,
    ):
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def read_torch(path: str | Path) -> Any:
    """What `torch.save` wrote, plainly or as a gzip: tensors on the CPU, and plain data.

    Only torch's restricted reader is used. Raises ForeignFileRefused.
    """
    data = read_file(path)
    if data.startswith(b"\x1f\x8b"):
        with _refusing(path, "gzip"), gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise corrupt(path, f"it unpacks to more than {MAX_FILE_BYTES:,} bytes")
    _check_zip(data, path)
    with _refusing(path, "torch's restricted reader"):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


@contextmanager
def _refusing(path: str | Path, what: str) -> Iterator[None]:
    """Refuse a file that a library cannot read: numpy, torch and zipfile raise many kinds of errors."""
    try:
        yield
    except ForeignFileRefused:
        raise
    except Exception as error:
        # torch wraps the reason in advice to read the file without restrictions.
        inner = error.__context__ if isinstance(error.__context__, type(error)) else error
        detail = f"{what}: {type(error).__name__}: {inner}".partition(". Please use")[0]
        raise corrupt(path, detail.partition("\n")[0]) from error


def tensor_in(value: object, name: str, path: str | Path, *, ndim: int) -> torch.Tensor:
    """`value` as a tensor of float32, float16 or bfloat16 with `ndim` dimensions and memory of its own.

    Raises ForeignFileRefused, also for None: there is none.
    """
    if value is None:
        raise corrupt(path, f"it has no {name}")
    if type(value) is not torch.Tensor or value.layout != torch.strided or value.device.type != "cpu":
        raise corrupt(path, f"{name} is a {type(value).__name__}; it must be a plain tensor")
    shape = tuple(value.shape)
    if value.dtype not in _DTYPES or len(shape) != ndim or 0 in shape:
        allowed = f"float32, float16 or bfloat16 with {ndim} dimensions"
        raise corrupt(path, f"{name} is {value.dtype} {list(shape)}; it must be {allowed}")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise corrupt(path, f"{name} of shape {list(shape)} has more values than the file")
    return value.detach().clone(memory_format=torch.contiguous_format)


def flaw_of(tensor: torch.Tensor) -> str | None:
    """What makes a tensor unusable: `nan`, `inf` or `all-zero`. As `models.vae.problems`, which imports diffusers."""
    if not tensor.isfinite().all():
        return "nan" if tensor.isnan().any() else "inf"
    return None if tensor.any() else "all-zero"


def _check_zip(data: bytes, path: str | Path) -> None:
    """Compare each member with its checksum: numpy may not read to its end, and torch compares none."""
    with _refusing(path, "it is not a whole zip file"), zipfile.ZipFile(io.BytesIO(data)) as archive:
        num_bytes = sum(member.file_size for member in archive.infolist())
        if num_bytes > MAX_FILE_BYTES:
            raise corrupt(path, f"it unpacks to {num_bytes:,} bytes; {MAX_FILE_BYTES:,} are allowed")
        if (damaged := archive.testzip()) is not None:
            raise corrupt(path, f"{damaged} does not have its checksum")
