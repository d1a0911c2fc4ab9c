"""From a decoded mask to the weights of an image's latents, one for each."""

from __future__ import annotations

import numpy as np

from latentcache.dataset.images import prepare
from latentcache.dataset.resampling import BOX
from latentcache.types import Geometry


def mask_policy(images: dict[str, str], *, alpha: bool) -> dict[str, str]:
    """What changes the values of every mask, by name, where images have the policy `images`.

    With `alpha` it is the image's own alpha channel.
    """
    if alpha:
        return {**images, "colour": "alpha-channel", "alpha": "alpha-channel", "resample": BOX}
    return {**images, "colour": f"{images['colour']} luma", "resample": BOX}


def luma(pixels: np.ndarray) -> np.ndarray:
    """The brightness of sRGB pixels, uint8 [H, W, 3] -> uint8 [H, W], as Pillow's mode L has it (ITU-R 601-2)."""
    red, green, blue = (pixels[..., channel].astype(np.uint32) for channel in range(3))
    grey: np.ndarray = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
    return grey.astype(np.uint8)


def kept_by(mask: np.ndarray, rule: str) -> np.ndarray:
    """How much of each pixel a mask leaves, uint8 of its shape; the rest of it is grey, which is 0 of -1 to 1.

    `hard`: all or nothing, as diffusers' inpainting pipelines have it: `image * (mask < 0.5)`, of -1 to 1.
    `soft`: as OneTrainer has it, of 0 to 1: `image * (1 - mask) + 0.5 * mask`.
    """
    left: np.ndarray = np.where(mask < 128, np.uint8(255), np.uint8(0)) if rule == "hard" else np.uint8(255) - mask
    return left


def prepare_mask(values: np.ndarray, geometry: Geometry, downscale: int) -> np.ndarray:
    """The mask [H, W] prepared as its image is; then the mean of squares of `downscale` pixels.

    uint8 [1, h, w], halves rounded up. kohya's trainer has the mean too (`interpolate(..., mode="area")` in
    `apply_masked_loss`), of floating point. ValueError for a mask of another size than the geometry's.
    """
    taken, (height, width) = prepare(values, geometry, BOX), geometry.target_size
    rows, columns, area = height // downscale, width // downscale, downscale**2
    squares = taken[: rows * downscale, : columns * downscale].reshape(rows, downscale, columns, downscale)
    means: np.ndarray = (squares.sum(axis=(1, 3), dtype=np.uint32) + area // 2) // area
    mask: np.ndarray = means.astype(np.uint8)[None]
    return mask
