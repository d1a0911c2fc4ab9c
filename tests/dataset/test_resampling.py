"""Resize filters, against the pixels that the trainers' own functions gave."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image

from latentcache.dataset.resampling import FILTERS, resize
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


@pytest.mark.parametrize("name", sorted(FILTERS))
def test_one_colour_stays_that_colour(name: str) -> None:
    random = Random(0)
    for _ in range(100):
        height, width, tall, wide = (random.randint(1, 60) for _ in range(4))
        if name == "opencv-area":
            tall, wide = min(tall, height), min(wide, width)
        plain = np.full((height, width, 3), (255, 128, 3), np.uint8)
        assert (resize(plain, Size(tall, wide), name) == (255, 128, 3)).all()


def test_pillows_filters_are_pillows_own() -> None:
    pixels = noise(Size(60, 80))
    for name, own in (("lanczos", Image.Resampling.LANCZOS), ("bicubic", Image.Resampling.BICUBIC)):
        wanted = np.asarray(Image.fromarray(pixels).resize((30, 20), own))
        np.testing.assert_array_equal(resize(pixels, Size(20, 30), name), wanted)
