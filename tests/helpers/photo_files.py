"""Writes random photos, masks and clips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def write_photo(path: Path, seed: int, size: tuple[int, int] = (96, 128), **save: Any) -> Path:
    """Write a smooth random photo of `size` (height, width)."""
    generator = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    _photo(generator, size).save(path, **save)
    return path


def write_mask(path: Path, seed: int, shape: tuple[int, ...] = (96, 128)) -> Path:
    """Write random values of `shape`: (height, width) for grey, (height, width, 3) for three channels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)).save(path)
    return path


def write_clip(path: Path, seed: int, size: tuple[int, int] = (96, 128), num_frames: int = 5) -> Path:
    """Write an animation of random photos, 0.1 s each. The first one is that of `write_photo`."""
    generator = np.random.default_rng(seed)
    frames = [_photo(generator, size) for _ in range(num_frames)]
    path.parent.mkdir(parents=True, exist_ok=True)
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=100)
    return path


def write_photos(folder: Path) -> Path:
    """Write five photos in two buckets, with two, one, a shared or no caption, one of them in a subfolder."""
    for number, (name, size, captions) in enumerate(
        [
            ("a.png", (80, 144), ["a red house", "a house in the rain"]),
            ("b.png", (80, 144), ["a blue car"]),
            ("c.png", (144, 80), ["a blue car"]),
            ("d.png", (144, 80), None),
            ("sub/e.png", (80, 144), ["a tree"]),
        ]
    ):
        path = write_photo(folder / name, number, size)
        if captions is not None:
            path.with_suffix(".txt").write_text("\n".join(captions) + "\n", encoding="utf-8")
    return folder


def _photo(generator: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    small = generator.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((size[1], size[0]), Image.Resampling.BICUBIC)
