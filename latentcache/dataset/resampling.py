"""Resize filters by name: Pillow's, and bit-exact versions of the two OpenCV filters that trainers use."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image  # for its resize filters; images.py decodes

from latentcache.types import Size

Array = np.ndarray
LANCZOS = "lanczos"
"""The default filter. Existing keys contain this name."""

BOX = "box"
"""The mean over the area of each output pixel; nearest neighbour when enlarging."""


def resize(pixels: Array, size: Size, name: str) -> Array:
    """Resize uint8 [H, W, 3] to uint8 [h, w, 3] of `size` with the filter `name`, one of `FILTERS`.

    Pillow's filters also take [H, W]. Raises KeyError for an unknown filter.
    """
    return pixels if pixels.shape[:2] == size else FILTERS[name](pixels, size)


def _pillow(filter_: Image.Resampling) -> Callable[[Array, Size], Array]:
    """A filter of Pillow, whose support scales with the reduction, so that nothing aliases."""
    return lambda pixels, size: np.asarray(Image.fromarray(pixels).resize((size.width, size.height), filter_))


def _opencv_area(pixels: Array, size: Size) -> Array:
    """OpenCV's INTER_AREA for shrinking: the mean over the area of each output pixel.

    As in OpenCV, columns are averaged before rows, sums are float32, and coverage of a pixel up to 0.001 is ignored.
    """
    (height, width), columns = pixels.shape[:2], np.ascontiguousarray(pixels.transpose(1, 0, 2))
    rows = np.ascontiguousarray(_averaged(columns, size.width).transpose(1, 0, 2))
    means = _averaged(rows, size.height)
    # Halves round to even; when halving both sides, OpenCV adds integers and rounds halves up.
    is_halved = (height, width) == (2 * size.height, 2 * size.width)
    return (np.floor(means + 0.5) if is_halved else np.rint(means)).astype(np.uint8)


def _averaged(pixels: Array, length: int) -> Array:
    """The means of `length` equal parts of the first axis: float32."""
    present = len(pixels)
    scale = present / length
    start = np.arange(length) * scale
    index = np.floor(start).astype(np.intp)[:, None] + np.arange(int(np.ceil(scale)) + 1)
    share = np.minimum(start[:, None] + scale, index + 1) - np.maximum(start[:, None], index)
    weights = (np.where(share > 1e-3, share, 0.0) / scale).astype(np.float32)
    total = np.zeros((length, *pixels.shape[1:]), np.float32)
    # One tap at a time: all at once would take `scale` times the memory of the image.
    for taken, weight in zip(np.minimum(index, present - 1).T, weights.T, strict=True):
        total += pixels[taken] * weight[:, None, None]
    return total


def _opencv_linear(pixels: Array, size: Size) -> Array:
    """OpenCV's INTER_LINEAR: linear between the two nearest pixels on each axis. It aliases when shrinking.

    As in OpenCV, weights are 11-bit integers, and each of the two rows is truncated to 16 bits before they are added.
    """
    (top, bottom), (above, below) = _neighbours(pixels.shape[0], size.height)
    (left, right), (before, behind) = _neighbours(pixels.shape[1], size.width)

    def row(which: Array, weight: Array) -> Array:
        taken = pixels[which]
        between: Array = taken[:, left] * before[:, None] + taken[:, right] * behind[:, None]
        share: Array = (weight[:, None, None] * (between >> 4)) >> 16
        return share

    both: Array = (row(top, above) + row(bottom, below) + 2) >> 2
    return both.clip(0, 255).astype(np.uint8)


def _neighbours(present: int, length: int) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """The source pixels before and after each output pixel on an axis, and their weights in 2048ths."""
    where = ((np.arange(length) + 0.5) * (1 / (length / present)) - 0.5).astype(np.float32)
    index = np.floor(where).astype(np.intp)
    share = where - index.astype(np.float32)
    weights = (np.rint(part * np.float32(2048)).astype(np.int32) for part in (np.float32(1) - share, share))
    before, behind = weights
    return (index.clip(0, present - 1), (index + 1).clip(0, present - 1)), (before, behind)


FILTERS: dict[str, Callable[[Array, Size], Array]] = {
    LANCZOS: _pillow(Image.Resampling.LANCZOS),
    "bicubic": _pillow(Image.Resampling.BICUBIC),
    "bilinear": _pillow(Image.Resampling.BILINEAR),
    BOX: _pillow(Image.Resampling.BOX),
    "opencv-area": _opencv_area,
    "opencv-linear": _opencv_linear,
}
"""Name -> filter. Names are part of entry identities and cannot change."""
