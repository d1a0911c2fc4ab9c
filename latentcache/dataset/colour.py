"""Colours of an ICC profile -> sRGB."""

from __future__ import annotations

import functools
import logging
from io import BytesIO

import numpy as np
from PIL import Image, ImageCms  # its colour engine; images.py decodes

_log = logging.getLogger(__name__)

_MODE_OF_COLOUR_SPACE = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}


def to_srgb(image: Image.Image, icc: bytes | None, path: str) -> Image.Image:
    """Mode L, RGB or CMYK, with this ICC profile -> RGB in sRGB. `path` is for the log."""
    if icc:
        found, transform = _conversion(icc)
        mode = "RGB" if found == "RGB" and image.mode == "L" else image.mode
        if isinstance(transform, str):
            _log.warning("%s: its ICC profile cannot be used, and is ignored: %s", path, transform)
        elif found != mode:
            _log.warning("%s: its ICC profile is for %s images, not %s; ignored", path, found, image.mode)
        elif transform is not None:
            converted = ImageCms.applyTransform(image.convert(mode), transform)
            assert converted is not None  # only in place it returns None
            return converted
    return image.convert("RGB")


@functools.lru_cache(maxsize=16)
def _conversion(icc: bytes) -> tuple[str, ImageCms.ImageCmsTransform | str | None]:
    """The mode that a profile describes, and its transform to sRGB; None if it is sRGB, a text if it is unusable.

    Most images of a dataset share a few profiles.
    """
    try:
        profile = ImageCms.ImageCmsProfile(BytesIO(icc))
        mode = _MODE_OF_COLOUR_SPACE.get(profile.profile.xcolor_space.strip())
        if mode is None:
            return "", f"unknown colour space {profile.profile.xcolor_space!r}"
        transform = ImageCms.buildTransform(
            profile,
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            ImageCms.Intent.PERCEPTUAL,
            # lcms shares a transform between threads only without its cache of the last pixel.
            ImageCms.Flags.NOCACHE,
        )
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError) as error:
        return "", str(error)
    return mode, None if _is_srgb(transform, mode) else transform


def _is_srgb(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    """Whether it moves no colour of a grid by more than one step. A profile's name is no proof."""
    if mode == "CMYK":
        return False
    levels = np.arange(0, 256, 15, dtype=np.uint8)
    grid = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).reshape(1, -1, 3)
    if mode == "L":
        grid = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(1, -1, 3)
    source = Image.fromarray(grid if mode == "RGB" else np.ascontiguousarray(grid[..., 0]))
    moved = np.asarray(ImageCms.applyTransform(source, transform))
    return bool(np.abs(moved.astype(np.int16) - grid).max() <= 1)
