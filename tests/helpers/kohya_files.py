"""Cache files of kohya's sd-scripts for SDXL, written from its specification, not by this project's exporter."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np


def latents_of(seed: int, height: int, width: int) -> np.ndarray:
    """Unscaled latents like those of SDXL's VAE: float32 [4, height / 8, width / 8]."""
    values = np.random.default_rng(seed).normal(0, 7.7, (4, height // 8, width // 8))
    return values.astype(np.float32)


def dialect_a(seed: int, width: int, height: int, bucket: tuple[int, int], **more: Any) -> dict[str, np.ndarray]:
    """The arrays for an image of width x height pixels in a bucket (width, height), updated with `more`."""
    bucket_width, bucket_height = bucket
    aspect = width / height
    if bucket_width / bucket_height > aspect:
        resized_width, resized_height = bucket_height * aspect, bucket_height
    else:
        resized_width, resized_height = bucket_width, bucket_width / aspect
    left, top = (bucket_width - resized_width) // 2, (bucket_height - resized_height) // 2
    return {
        "latents": latents_of(seed, bucket_height, bucket_width),
        "original_size": np.array([width, height], dtype=np.int64),
        "crop_ltrb": np.array([left, top, left + resized_width, top + resized_height], dtype=np.float64),
        **more,
    }


def dialect_b(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same arrays, with their resolution as suffix: in latent units, height first."""
    height, width = arrays["latents"].shape[1:]
    return {f"{name}_{height}x{width}": array for name, array in arrays.items()}


def text_of(seed: int, dtype: type = np.float32, length: int = 77) -> dict[str, np.ndarray]:
    """The arrays of a text file."""
    generator = np.random.default_rng(seed)
    return {
        "hidden_state1": generator.normal(size=(length, 768)).astype(dtype),
        "hidden_state2": generator.normal(size=(length, 1280)).astype(dtype),
        "pool2": generator.normal(size=1280).astype(dtype),
    }


def latents_name(stem: str, width: int, height: int) -> str:
    return f"{stem}_{width:04d}x{height:04d}_sdxl.npz"


def npz_of(arrays: dict[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(npz_of(arrays))
    return path
