"""What the tests of other trainers' caches share: tensors, files as those trainers write them, and damage."""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from latentcache.interop.readers import ForeignCache, ForeignImage, ForeignItem, ForeignText
from latentcache.types import Refusal


class Bomb:
    """Unpickled, it makes a directory."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


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


def rezipped(data: bytes, changes: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A torch.save file with other members, by the ends of their names; checksums are right."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", compression) as new:
        for name in old.namelist():
            end = next((end for end in changes if name.endswith(end)), None)
            new.writestr(name, old.read(name) if end is None else changes[end])
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


def reasons(refusals: Iterable[Refusal]) -> list[str]:
    return [refusal.reason for refusal in refusals]


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """These bytes, cut, with flipped bits, or with a piece overwritten."""
    kind = draw(st.sampled_from(["cut", "flip", "overwrite", "garbage"]))
    if kind == "cut":
        return data[: draw(st.integers(0, len(data) - 1))]
    if kind == "garbage":
        return draw(st.binary(max_size=200))
    changed = bytearray(data)
    # Half of the places are near the ends, where the headers are.
    near = st.one_of(st.integers(0, min(600, len(data) - 1)), st.integers(max(0, len(data) - 900), len(data) - 1))
    place = st.one_of(near, st.integers(0, len(data) - 1))
    if kind == "flip":
        for at in draw(st.lists(place, min_size=1, max_size=4)):
            changed[at] ^= 1 << draw(st.integers(0, 7))
    else:
        at = draw(place)
        piece = draw(st.binary(min_size=1, max_size=16))
        changed[at : at + len(piece)] = piece
    return bytes(changed)


def items_quietly(cache: ForeignCache) -> list[ForeignItem]:
    """All items; warnings are errors, and no file stays open."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return list(cache.items())
