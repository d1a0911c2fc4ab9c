"""One sample of a batch: which entries it needs, and what the manifest says of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from latentcache.dataset.manifest import ImageRef, Row
from latentcache.errors import SampleError
from latentcache.families import sdxl
from latentcache.types import Geometry

SIZES = ("original_size", "resized_size", "crop_top_left", "target_size")
_FLOAT32 = np.dtype(np.float32)
_MAX_LAYOUTS = 1 << 16  # photographs have few sizes; a set of crops may have many


Pair = tuple[int, int]


class Layout(NamedTuple):
    """What a batch tells of a geometry: the pairs of SIZES, and the six time ids as float32. Made once for each."""

    original_size: Pair
    resized_size: Pair
    crop_top_left: Pair
    target_size: Pair
    time_ids: bytes


@lru_cache(_MAX_LAYOUTS)
def layout_of(geometry: Geometry) -> Layout:
    """The layout of a geometry. Time ids are float32: bfloat16 cannot hold every integer above 256."""
    ids = sdxl.time_ids(geometry.original_size, geometry.crop_top_left, geometry.target_size)
    pairs = [tuple(getattr(geometry, name)) for name in SIZES]
    return Layout(*pairs, np.array(ids, dtype=np.float32).tobytes())


@dataclass(frozen=True, slots=True)
class Wanted:
    """One sample of a batch: which image entry and which text entry, and what is told of them."""

    sample_id: str
    image_key: str
    geometry: Geometry
    caption_key: str
    caption: str
    layout: Layout

    @classmethod
    def of(cls, row: Row, *, caption: int = 0, flip: bool = False) -> Wanted:
        image = _image_of(row, flip)
        if not 0 <= caption < len(row.captions):
            met = f"has {len(row.captions)} captions, but number {caption} was asked for"
            raise SampleError(row.sample_id, met, "ask for a smaller number")
        text = row.captions[caption]
        return cls(row.sample_id, image.key, image.geometry, text.key, text.text, layout_of(image.geometry))


def _image_of(row: Row, flip: bool) -> ImageRef:
    for ref in row.images:
        if ref.geometry.flip == flip:
            return ref
    remedy = "set `flip: true` for the dataset and run `latentcache precache CONFIG` again"
    raise SampleError(row.sample_id, "has no flipped entry" if flip else "has no image entry", remedy)


def facts(wanted: Sequence[Wanted]) -> dict[str, Any]:
    """What the manifest says of these samples: ids, captions, sizes, and the time ids that follow from them."""
    sample_ids = [item.sample_id for item in wanted]
    return told(sample_ids, [item.caption for item in wanted], [item.layout for item in wanted])


def told(sample_ids: Iterable[str], captions: Iterable[str], layouts: Sequence[Layout]) -> dict[str, Any]:
    """The same, of samples whose layouts are known."""
    original_size, resized_size, crop_top_left, target_size, time_ids = zip(*layouts, strict=True)
    return {
        "sample_id": list(sample_ids),
        "caption": list(captions),
        "original_size": list(original_size),
        "resized_size": list(resized_size),
        "crop_top_left": list(crop_top_left),
        "target_size": list(target_size),
        "add_time_ids": _tensor(time_ids),
    }


def add_time_ids(geometries: Sequence[Geometry]) -> torch.Tensor:
    """original_size + crop_top_left + target_size of each image: float32 [B, 6]. `layout_of` says why so."""
    return _tensor([layout_of(geometry).time_ids for geometry in geometries])


def _tensor(time_ids: Sequence[bytes]) -> torch.Tensor:
    # A fifth of the time that a tensor made of lists takes. The bytearray is this tensor's own memory.
    return torch.from_numpy(np.ndarray((len(time_ids), 6), _FLOAT32, bytearray().join(time_ids)))
