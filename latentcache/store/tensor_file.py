"""Safetensors documents with aligned data: their header, written and read.

The header is padded so that data starts on 64 bytes, and so does every tensor: unaligned copies are up to 5 times
slower. safetensors allows no holes, so the gap before a tensor is itself a small tensor, `_padding/<i>`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from typing_extensions import override

from latentcache.errors import PackError
from latentcache.store.base import ALIGNMENT, DTYPES, flat_bytes
from latentcache.utils.durable_files import unreadable

MAX_HEADER_BYTES = 1 << 20
"""Of the header. A writer's stays below 16 KiB; more is refused before it is parsed."""

MAX_TENSORS, MAX_DIMENSIONS = 1 << 13, 16
"""Of a pack, where each column may have its offsets and a gap before each; and of one of its tensors."""

HEAD_BYTES = 64 << 10
"""Fetched first of a pack that is elsewhere: its header, and the keys and digests of a thousand entries."""

_SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
_Bytes = TypeVar("_Bytes", bytes, memoryview)
_OUR_DTYPES = {theirs: ours for ours, theirs in _SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of a document: its name, dtype and shape, and where its bytes come from when it is written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Sequence[Any] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class TensorDocument:
    """A document to be written: its header, and the tensors that follow it."""

    head: bytes
    tensors: Sequence[NamedTensor]

    @classmethod
    def of(cls, metadata: Mapping[str, str], tensors: Sequence[NamedTensor]) -> TensorDocument:
        """The document with these tensors, in this order, as `aligned` gave them."""
        header: dict[str, object] = {"__metadata__": metadata}
        start = 0
        for tensor in tensors:
            header[tensor.name] = {
                "dtype": _SAFETENSORS_DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, start + tensor.num_bytes],
            }
            start += tensor.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode("ascii")
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        return cls(len(text).to_bytes(8, "little") + text, tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return len(self.head) + sum(tensor.num_bytes for tensor in self.tensors)

    def buffers(self) -> Iterator[bytes | memoryview]:
        """The bytes, one buffer after the other. Views of tensors are flat."""
        yield self.head
        for tensor in self.tensors:
            for part in tensor.parts:
                if isinstance(part, torch.Tensor):
                    yield flat_bytes(part).data
                else:
                    yield part if isinstance(part, bytes) else part.reshape(-1).view(np.uint8).data


def aligned(tensors: Sequence[NamedTensor]) -> list[NamedTensor]:
    """The tensors, with one of zeros before each that would not start on 64 bytes."""
    padded: list[NamedTensor] = []
    end = 0
    for tensor in tensors:
        gap = -end % ALIGNMENT
        if gap:
            padded.append(NamedTensor(f"_padding/{len(padded)}", "uint8", (gap,), [np.zeros(gap, np.uint8)]))
        padded.append(tensor)
        end += gap + tensor.num_bytes
    return padded


def starts_of(tensors: Sequence[NamedTensor], data_start: int) -> dict[str, int]:
    """Where each tensor starts in the document."""
    starts = accumulate([tensor.num_bytes for tensor in tensors], initial=data_start)
    return {tensor.name: start for tensor, start in zip(tensors, starts, strict=False)}


class FileBytes:
    """The bytes of an open file. `path` names it in errors."""

    def __init__(self, path: Path, fd: int):
        self.path, self._fd = path, fd
        self.num_bytes = os.fstat(fd).st_size

    def read(self, offset: int, num_bytes: int) -> bytes:
        """So many bytes. PackError if the file ends before; StoreError: it cannot be read now."""
        try:
            data = os.pread(self._fd, num_bytes, offset)
        except (OSError, MemoryError, OverflowError) as error:
            raise unreadable(self.path, error) from error
        return _whole(self.path, data, offset, num_bytes)


class MemoryBytes:
    """Bytes in memory. `path` names them in errors."""

    def __init__(self, path: Path | str, data: bytes | memoryview):
        self.path, self._data = path, memoryview(data).cast("B")
        self.num_bytes = len(self._data)

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """A view of so many bytes. PackError if there are fewer."""
        return _whole(self.path, self._data[offset : offset + num_bytes], offset, num_bytes)


class RangedBytes(MemoryBytes):
    """As `MemoryBytes`, of bytes that are elsewhere: the first are fetched, and more when they are needed.

    `fetch(offset, number)` brings them. PackError if it brings fewer.
    """

    def __init__(self, path: Path | str, num_bytes: int, fetch: Callable[[int, int], bytes | memoryview]):
        super().__init__(path, b"")
        self.num_bytes, self._fetch = num_bytes, fetch
        self._fetch_to(HEAD_BYTES)

    def _fetch_to(self, end: int) -> None:
        start, end = len(self._data), min(end, self.num_bytes)
        if end > start:
            more = _whole(self.path, bytes(self._fetch(start, end - start)), start, end - start)
            self._data = memoryview(bytes(self._data) + more)

    @override
    def read(self, offset: int, num_bytes: int) -> memoryview:
        if offset + num_bytes > len(self._data):
            self._fetch_to(offset + 2 * num_bytes)  # what comes next is about as long
        return super().read(offset, num_bytes)


def _whole(path: Path | str, data: _Bytes, offset: int, num_bytes: int) -> _Bytes:
    if len(data) != num_bytes:
        raise PackError(path, f"ends after {offset + len(data):,} bytes, where {offset + num_bytes:,} are needed")
    return data


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What the header of a document says. `tensors` are in the order of their bytes, which start at `data_start`."""

    metadata: Mapping[str, str]
    tensors: Sequence[NamedTensor]
    data_start: int


def read_header(source: FileBytes | MemoryBytes, check_metadata: Callable[[Mapping[str, str]], None]) -> TensorHeader:
    """Read and check a header. PackError for holes, overlaps, another length, and more than the bounds above.

    `check_metadata` comes before the tensors are looked at, and raises what is wrong with the metadata. A plain
    StoreError says that the file cannot be read now, and nothing about what it holds.
    """
    path = source.path
    head_bytes = 8 + int.from_bytes(bytes(source.read(0, 8)), "little")
    if head_bytes > 8 + MAX_HEADER_BYTES:
        raise PackError(path, f"its header has {head_bytes:,} bytes; at most {MAX_HEADER_BYTES:,} are allowed")
    try:
        # With a parser of its own a reader depends on no release of safetensors.
        header = json.loads(str(source.read(8, head_bytes - 8), "utf-8"))
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("its metadata has values that are no texts")
        check_metadata(metadata)
        if len(header) > MAX_TENSORS:
            raise PackError(path, f"its header has {len(header):,} tensors; at most {MAX_TENSORS:,} are allowed")
        tensors, end = [], 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            tensor = NamedTensor(name, _OUR_DTYPES[entry["dtype"]], tuple(entry["shape"]))
            # Bounded before they are multiplied: the product of a long shape of large numbers takes seconds.
            if len(tensor.shape) > MAX_DIMENSIONS or any(
                type(number) is not int or not 0 <= number < 1 << 48 for number in tensor.shape
            ):
                raise ValueError(f"the shape of {name!r:.80} is {tensor.shape!r:.80}")
            # As safetensors demands: no holes, no overlaps, and no bytes after the last tensor.
            start, end = end, end + tensor.num_bytes
            tensors.append(tensor)
            if entry["data_offsets"] != [start, end]:
                raise ValueError(f"{name!r:.80} lies at {entry['data_offsets']!r:.80}, and {[start, end]} is expected")
        if head_bytes + end != source.num_bytes:
            raise PackError(path, f"has {source.num_bytes:,} bytes, and its header says {head_bytes + end:,}")
    except MemoryError as error:
        raise unreadable(path, error) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise PackError(path, f"not a pack: {error!r:.200}") from error
    return TensorHeader(metadata, tensors, head_bytes)
