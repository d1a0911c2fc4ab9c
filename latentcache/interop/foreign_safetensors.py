"""Safetensors files that other trainers wrote: their metadata, and their tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from latentcache.errors import ForeignFileRefused
from latentcache.interop.foreign_files import corrupt, opened, read_at

_MAX_HEADER_BYTES = 1 << 20


def metadata_in(data: bytes, path: str | Path) -> dict[str, str]:
    """The metadata of a file; nothing where it has none. Raises ForeignFileRefused."""
    length = int.from_bytes(data[:8], "little")
    if length > min(len(data) - 8, _MAX_HEADER_BYTES):
        raise ForeignFileRefused(path, "truncated", f"its header has {length:,} bytes, more than there are or may be")
    try:
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    except (ValueError, AttributeError, RecursionError) as error:
        raise corrupt(path, f"its metadata cannot be read: {error}") from error
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise corrupt(path, "its metadata are no texts by name")
    return metadata


def metadata_of(path: str | Path) -> dict[str, str]:
    """The metadata of a file, of which only the header is read. Raises ForeignFileRefused."""
    with opened(path) as (fd, _):
        length = int.from_bytes(read_at(fd, 0, 8), "little")
        return metadata_in(read_at(fd, 0, 8 + min(length, _MAX_HEADER_BYTES)), path)


def tensors_in(data: bytes, path: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by name, on the CPU. Raises ForeignFileRefused."""
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError, OverflowError) as error:
        raise corrupt(path, f"safetensors: {error}") from error


def safetensors_bytes(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a file with these tensors."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return save(contiguous, None if metadata is None else dict(metadata))
