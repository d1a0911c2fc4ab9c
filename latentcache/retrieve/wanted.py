"""One sample of a batch: which entries it needs, and what the manifest says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from latentcache.dataset.manifest import ImageRef, Row
from latentcache.errors import SampleError
from latentcache.types import Geometry

SIZES = ("original_size", "resized_size", "crop_top_left", "target_size")
_MAX_LAYOUTS = 1 << 16  # photographs have few sizes; a set of crops may have many


@dataclass(frozen=True, slots=True)
class Layout:
    """What a batch tells of a geometry: the pairs of SIZES, and the six time ids as float32. Made once for each."""

    geometry: Geometry
    pairs: tuple[tuple[int, int], ...]
    time_ids: bytes


@lru_cache(_MAX_LAYOUTS)
def layout_of(geometry: Geometry) -> Layout:
    """The layout of a geometry. Time ids are original_size + crop_top_left + target_size.

    The order is that of diffusers' `StableDiffusionXLPipeline._get_add_time_ids`. float32, because bfloat16 cannot
    hold every integer above 256.
    """
    time_ids = [*geometry.original_size, *geometry.crop_top_left, *geometry.target_size]
    pairs = tuple([tuple(getattr(geometry, name)) for name in SIZES])
    return Layout(geometry, pairs, np.array(time_ids, dtype=np.float32).tobytes())


@dataclass(frozen=True, slots=True)
class Wanted:
    """One sample of a batch: which image entry and which text entry. A prompt has no image."""

    sample_id: str
    image_key: str | None
    layout: Layout | None
    caption: str
    caption_key: str

    @property
    def geometry(self) -> Geometry | None:
        return None if self.layout is None else self.layout.geometry

    @classmethod
    def of(cls, row: Row, *, caption: int = 0, flip: bool = False) -> Wanted:
        image = _image_of(row, flip)
        if not 0 <= caption < len(row.captions):
            met = f"has {len(row.captions)} captions, but number {caption} was asked for"
            raise SampleError(row.sample_id, met, "ask for a smaller number")
        text = row.captions[caption]
        return cls(row.sample_id, image.key, layout_of(image.geometry), text.text, text.key)


def _image_of(row: Row, flip: bool) -> ImageRef:
    for ref in row.images:
        if ref.geometry.flip == flip:
            return ref
    remedy = "set `flip: true` for the dataset and run `latentcache precache CONFIG` again"
    raise SampleError(row.sample_id, "has no flipped entry" if flip else "has no image entry", remedy)


def facts(wanted: Sequence[Wanted]) -> dict[str, Any]:
    """What the manifest says of these samples: ids, captions, sizes, and the time ids that follow from them."""
    layouts = [item.layout for item in wanted if item.layout is not None]
    told: dict[str, Any] = {
        "sample_id": [item.sample_id for item in wanted],
        "caption": [item.caption for item in wanted],
    }
    for number, name in enumerate(SIZES):
        told[name] = [layout.pairs[number] for layout in layouts]
    told["add_time_ids"] = _time_ids(layouts)
    return told


def add_time_ids(geometries: Sequence[Geometry]) -> torch.Tensor:
    """original_size + crop_top_left + target_size of each image: float32 [B, 6]. `layout_of` says why so."""
    return _time_ids([layout_of(geometry) for geometry in geometries])


def _time_ids(layouts: Sequence[Layout]) -> torch.Tensor:
    # A fifth of the time that a tensor made of lists takes. The bytearray is this tensor's own memory.
    values = np.frombuffer(bytearray().join([layout.time_ids for layout in layouts]), dtype=np.float32)
    return torch.from_numpy(values.reshape(-1, 6))
