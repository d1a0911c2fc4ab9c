"""Resize filters, against the pixels that the trainers' own functions gave."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from latentcache.dataset.resampling import resize
from latentcache.types import Size

RECORDED = json.loads((Path(__file__).parent / "data/resized_pixels.json").read_text())["cases"]


def noise(size: Size) -> np.ndarray:
    """The same pixels on every machine."""
    data = hashlib.shake_256(f"{size.height}x{size.width}".encode()).digest(size.height * size.width * 3)
    return np.frombuffer(data, np.uint8).reshape(*size, 3)


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: f"{case['rule']}-{case['size']}-{case['resized']}")
def test_pixels_are_those_of_the_trainer_bit_for_bit(case: dict) -> None:
    size, resized = Size(*case["size"]), Size(*case["resized"])
    shrinks = resized.height <= size.height and resized.width <= size.width
    name = "opencv-linear" if case["rule"] == "simpletuner" else "opencv-area" if shrinks else "lanczos"
    got = np.ascontiguousarray(resize(noise(size), resized, name))
    assert got.shape == (*resized, 3) and got.dtype == np.uint8
    assert hashlib.sha256(got.tobytes()).hexdigest() == case["sha256"]
