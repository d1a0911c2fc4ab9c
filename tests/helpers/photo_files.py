"""Photos made in code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def write_photo(path: Path, seed: int, size: tuple[int, int] = (96, 128), **save: Any) -> Path:
    """A smooth random photo of `size` (height, width)."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(small).resize((size[1], size[0]), Image.Resampling.BICUBIC).save(path, **save)
    return path
