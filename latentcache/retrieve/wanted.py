"""One sample of a batch: which entries it needs, and what the manifest says of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from latentcache.dataset.manifest import ImageRef, Row
from latentcache.errors import SampleError
from latentcache.types import Geometry

SIZES = ("original_size", "resized_size", "crop_top_left", "target_size")
_LISTS = ("caption", *SIZES)
NUM_FACTS = len(_LISTS) + 1
"""How many `Wanted.facts` has: those of the lists, and the time ids."""
_MAX_LAYOUTS = 1 << 16  # photographs have few sizes; a set of crops may have many


@dataclass(frozen=True, slots=True)
class Layout:
    """What a batch tells of a geometry: the pairs of SIZES, and the six time ids as float32. Made once for each."""

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
    return Layout(pairs, np.array(time_ids, dtype=np.float32).tobytes())


@dataclass(frozen=True, slots=True)
class Wanted:
    """One sample of a batch: which image entry and which text entry.

    `facts` are the caption, the pairs of SIZES and the time ids as bytes.
    """

    sample_id: str
    image_key: str
    geometry: Geometry
    caption_key: str
    facts: tuple[Any, ...]

    @classmethod
    def of(cls, row: Row, *, caption: int = 0, flip: bool = False) -> Wanted:
        image = _image_of(row, flip)
        if not 0 <= caption < len(row.captions):
            met = f"has {len(row.captions)} captions, but number {caption} was asked for"
            raise SampleError(row.sample_id, met, "ask for a smaller number")
        text, layout = row.captions[caption], layout_of(image.geometry)
        facts = (text.text, *layout.pairs, layout.time_ids)
        return cls(row.sample_id, image.key, image.geometry, text.key, facts)


def _image_of(row: Row, flip: bool) -> ImageRef:
    for ref in row.images:
        if ref.geometry.flip == flip:
            return ref
    remedy = "set `flip: true` for the dataset and run `latentcache precache CONFIG` again"
    raise SampleError(row.sample_id, "has no flipped entry" if flip else "has no image entry", remedy)


def facts(wanted: Sequence[Wanted]) -> dict[str, Any]:
    """What the manifest says of these samples: ids, captions, sizes, and the time ids that follow from them."""
    return told([item.sample_id for item in wanted], list(zip(*[item.facts for item in wanted], strict=True)))


def told(sample_ids: Iterable[str], columns: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The same of facts that are sorted: `columns` has the values of all samples for each of `Wanted.facts`."""
    *lists, time_ids = columns
    batch: dict[str, Any] = {"sample_id": list(sample_ids)}
    batch.update(zip(_LISTS, map(list, lists), strict=True))
    batch["add_time_ids"] = _tensor(time_ids)
    return batch


def add_time_ids(geometries: Sequence[Geometry]) -> torch.Tensor:
    """original_size + crop_top_left + target_size of each image: float32 [B, 6]. `layout_of` says why so."""
    return _tensor([layout_of(geometry).time_ids for geometry in geometries])


def _tensor(time_ids: Sequence[bytes]) -> torch.Tensor:
    # A fifth of the time that a tensor made of lists takes. The bytearray is this tensor's own memory.
    return torch.from_numpy(np.ndarray((len(time_ids), 6), np.float32, bytearray().join(time_ids)))
