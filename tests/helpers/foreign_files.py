"""What the tests of other trainers' caches share: tensors, files as those trainers write them, and damage."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from latentcache.interop.readers import ForeignCache, ForeignImage, ForeignItem, ForeignText
from latentcache.types import Refusal


def latents_of(seed: int, height: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[4, h, w] for an image of (height, width) pixels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, height // 8, width // 8, generator=generator).to(dtype)


def embeds_of(seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """[77, 2048] and [1280]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(77, 2048, generator=generator).to(dtype), torch.randn(1280, generator=generator).to(dtype)


def saved(content: Any) -> bytes:
    """The bytes that torch.save writes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def split(cache: ForeignCache) -> tuple[list[ForeignImage], list[ForeignText], list[Refusal]]:
    """All items of a cache, by type."""
    items: list[ForeignItem] = list(cache.items())
    return (
        [item for item in items if isinstance(item, ForeignImage)],
        [item for item in items if isinstance(item, ForeignText)],
        [item for item in items if isinstance(item, Refusal)],
    )


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """These bytes, cut, or with some overwritten; half of the places are near the ends, where the headers are."""
    ends = st.one_of(st.integers(0, min(600, len(data) - 1)), st.integers(max(0, len(data) - 900), len(data) - 1))
    at = draw(st.one_of(ends, st.integers(0, len(data) - 1)))
    if draw(st.booleans()):
        return data[:at]
    piece = draw(st.binary(min_size=1, max_size=16))
    return data[:at] + piece + data[at + len(piece) :]


def items_quietly(cache: ForeignCache) -> list[ForeignItem]:
    """All items; warnings are errors, and no file stays open."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return list(cache.items())
