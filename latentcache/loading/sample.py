"""One sample of a batch: its entries, what the manifest says of it, and a memory of samples that were requested."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from latentcache.dataset.manifest import ImageRef, Row
from latentcache.errors import SampleError
from latentcache.families import sdxl
from latentcache.loading.batch import Scaling
from latentcache.types import Geometry

PRECACHE: Final = "run `latentcache precache CONFIG` again"
"""The remedy of most errors about a sample."""
SIZES: Final = ("original_size", "resized_size", "crop_top_left", "target_size")
MAX_REFS = 1 << 17
"""Samples that a `SampleMemory` keeps, at some 1,000 bytes each. Beyond it all are forgotten, and found again."""
UNREAD: Final = (-1, None, None, None, None)
"""`SampleRef.rows` of a sample that was not read. No store has this generation."""

_FLOAT32 = np.dtype(np.float32)
_MAX_LAYOUTS = 1 << 16  # photographs have few sizes; a set of crops may have many

Pair = tuple[int, int]


class Layout(NamedTuple):
    """What a batch says of a geometry: the pairs of SIZES, the same as int64 [4, 2], and the time ids as float32 [6].

    Equal ones are shared.
    """

    original_size: Pair
    resized_size: Pair
    crop_top_left: Pair
    target_size: Pair
    sizes: bytes
    time_ids: bytes


@lru_cache(_MAX_LAYOUTS)
def layout_of(geometry: Geometry) -> Layout:
    """The layout of a geometry. Time ids are float32: bfloat16 cannot hold every integer above 256."""
    ids = sdxl.time_ids(geometry.original_size, geometry.crop_top_left, geometry.target_size)
    pairs = [tuple(getattr(geometry, name)) for name in SIZES]
    original, resized, crop, target = pairs
    return Layout(
        original,
        resized,
        crop,
        target,
        np.array(pairs, dtype=np.int64).tobytes(),
        np.array(ids, dtype=np.float32).tobytes(),
    )


@dataclass(slots=True, eq=False)
class SampleRef:
    """One sample with one of its captions and one of its images: the keys of both entries, and what a batch says of it.

    `scaling` is that of its manifest, where a batch may mix manifests. `rows` belongs to `SampleReader`: the
    generation of the store in which the entries were read, `sample_id`, `caption`, `layout`, the description of all
    fields, and an array [1, *shape] of each. They are one tuple because the time of a batch that is not copying is
    cache misses, one for each object that is met.
    """

    sample_id: str
    image_key: str
    text_key: str
    caption: str
    layout: Layout
    scaling: Scaling | None = None
    rows: tuple[Any, ...] = UNREAD

    @classmethod
    def of(cls, row: Row, *, caption: int = 0, flip: bool = False) -> SampleRef:
        """The sample of a manifest's row. SampleError if it has no such caption or image."""
        image = _image_of(row, flip)
        if not 0 <= caption < len(row.captions):
            reason = f"has {len(row.captions)} captions, but number {caption} was requested"
            raise SampleError(row.sample_id, reason, "request a smaller number")
        text = row.captions[caption]
        return cls(row.sample_id, image.key, text.key, text.text, layout_of(image.geometry))


def _image_of(row: Row, flip: bool) -> ImageRef:
    for ref in row.images:
        if ref.geometry.flip == flip:
            return ref
    remedy = f"set `flip: true` for the dataset and {PRECACHE}"
    raise SampleError(row.sample_id, "has no flipped entry" if flip else "has no image entry", remedy)


class SampleMemory:
    """The samples that were requested, in tables of any names, and with them what was read of them.

    At most MAX_REFS are kept; a sample that is forgotten stays valid where it is in use. Any thread may use it.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[Any, ...], dict[Any, SampleRef]] = {}

    def __len__(self) -> int:
        return sum(map(len, list(self._tables.values())))

    def table(self, *name: Any, room_for: int = 0) -> dict[Any, SampleRef]:
        """The table of this name, for reading and for adding at most `room_for` samples."""
        if room_for and len(self) + room_for > MAX_REFS:
            self.forget()
        found = self._tables.get(name)
        return self._tables.setdefault(name, {}) if found is None else found

    def forget(self) -> None:
        """Forget all samples. A thread that still fills an old table does no harm."""
        self._tables = {}

    def release_rows(self) -> None:
        """Release the arrays of all samples."""
        for table in list(self._tables.values()):
            for ref in list(table.values()):
                ref.rows = UNREAD


def metadata_of(refs: Sequence[SampleRef]) -> dict[str, Any]:
    """What the manifest says of these samples: ids, captions, sizes, and the time ids that follow from them."""
    return joined_metadata([ref.sample_id for ref in refs], [ref.caption for ref in refs], [ref.layout for ref in refs])


def joined_metadata(sample_ids: Iterable[str], captions: Iterable[str], layouts: Iterable[Layout]) -> dict[str, Any]:
    """The same, of at least one sample. The lists are new ones."""
    original_size, resized_size, crop_top_left, target_size, _, time_ids = zip(*layouts, strict=True)
    return {
        "sample_id": list(sample_ids),
        "caption": list(captions),
        "original_size": list(original_size),
        "resized_size": list(resized_size),
        "crop_top_left": list(crop_top_left),
        "target_size": list(target_size),
        "add_time_ids": _time_ids_tensor(time_ids),
    }


def add_time_ids(geometries: Sequence[Geometry]) -> torch.Tensor:
    """original_size + crop_top_left + target_size of each image: float32 [B, 6]. `layout_of` says why float32."""
    return _time_ids_tensor([layout_of(geometry).time_ids for geometry in geometries])


def _time_ids_tensor(time_ids: Sequence[bytes]) -> torch.Tensor:
    # A fifth of the time that a tensor made of lists takes. The bytearray is this tensor's own memory.
    return torch.from_numpy(np.ndarray((len(time_ids), 6), _FLOAT32, bytearray().join(time_ids)))
