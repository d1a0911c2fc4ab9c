"""Every trainer's buckets and resize filters, against what was recorded from its own functions; and our own buckets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latentcache.config import BucketsConfig
from latentcache.dataset.bucket_rules import BucketRule, assign
from latentcache.dataset.resampling import resize
from latentcache.types import Geometry, Size

DATA = Path(__file__).parent / "data"
NUM_SIZES = 4000


@lru_cache
def recorded_sizes() -> tuple[Size, ...]:
    """The sizes of the tables: some of cameras and of buckets, the others from a linear congruential generator."""
    text = """1024x1024 512x512 1000x1000 832x1216 1216x832 1536x640 640x1536 768x1344 3000x2000 2000x3000 1920x1080
    1080x1920 4032x3024 3024x4032 6000x4000 800x600 600x800 256x256 64x64 100x100 1023x1025 1025x1023 2048x1024
    1024x2048 4096x1024 1024x4096 500x1500 1500x500 333x777 777x333"""
    found = [tuple(map(int, pair.split("x"))) for pair in text.split()]
    state = 20261122

    def side() -> int:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return 16 + (state >> 33) % (6000 if (state >> 20) & 1 else 1600)

    while len(found) < NUM_SIZES:
        pair = side(), side()
        if max(pair) <= 8 * min(pair):
            found.append(pair)
    return tuple(Size(height, width) for width, height in found)


def kohya(settings: dict[str, Any]) -> BucketsConfig:
    assert settings["resolution"][0] == settings["resolution"][1]
    return BucketsConfig(
        rule="kohya",
        resolution=settings["resolution"][0],
        step=settings["bucket_reso_steps"],
        square=not settings["enable_bucket"],
        min_side=settings["min_bucket_reso"],
        max_side=settings["max_bucket_reso"],
        upscale=not settings["bucket_no_upscale"],
    )


def simpletuner(settings: dict[str, Any]) -> BucketsConfig:
    by_area = settings["resolution_type"] == "area"
    return BucketsConfig(
        rule="simpletuner",
        resolution=round(1000 * settings["resolution"] ** 0.5) if by_area else settings["resolution"],
        resolution_type="pixel_area" if by_area else "pixel",
        step=settings["aspect_bucket_alignment"],
        square=settings["crop"] and settings["crop_aspect"] == "square",
    )


def onetrainer(settings: dict[str, Any]) -> BucketsConfig:
    return BucketsConfig(
        rule="onetrainer",
        resolution=int(settings["resolution"]),
        step=settings["quantization"],
        square=not settings["aspect_ratio_bucketing"],
    )


def diffusers(settings: dict[str, Any]) -> BucketsConfig:
    if "buckets" not in settings:
        return BucketsConfig(rule="diffusers", resolution=settings["resolution"])
    sizes = [tuple(map(int, pair.split(","))) for pair in settings["buckets"].split(";")]
    return BucketsConfig(rule="diffusers", sizes=sizes)


CONFIGS = [kohya, simpletuner, onetrainer, diffusers]


def cases() -> Iterator[Any]:
    for config in CONFIGS:
        table = json.loads((DATA / f"buckets_{config.__name__}.json").read_text())
        for number, case in enumerate(table["cases"]):
            yield pytest.param(config, case, id=f"{config.__name__}-{number}")


def line(size: Size, geometry: Geometry | None) -> str:
    """A line of a table: width before height, and nothing but the size where there is no bucket."""
    numbers = [size.width, size.height]
    if geometry is not None:
        (top, left), resized, target = geometry.crop_top_left, geometry.resized_size, geometry.target_size
        numbers += [resized.width, resized.height, left, top, target.width, target.height]
    return " ".join(map(str, numbers))


@pytest.mark.parametrize(("config", "case"), list(cases()))
def test_a_rule_gives_what_its_trainer_gave(config: Any, case: dict[str, Any]) -> None:
    rule = BucketRule(config(case["settings"]))
    lines = [line(size, rule.geometry(size)) for size in recorded_sizes()]
    by_size = {text.split(" ", 2)[0] + "x" + text.split(" ", 2)[1]: text for text in lines}
    for row in case["rows"]:  # they say what differs; the digest is of all sizes
        width, height = row.split()[:2]
        assert by_size[f"{width}x{height}"] == row
    assert sum(text.count(" ") == 1 for text in lines) == case["without_bucket"]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == case["sha256"]


@pytest.mark.parametrize(
    ("settings", "digest"),
    [
        ({}, "279d8bf38042a1e3b6d5f06f3bfcfcde1c2c576318cee65bd0ddc0f86d5ebcd4"),
        ({"area": 512 * 512}, "deda7332e3292c8e1a8cd9f7d9dcc5d0d65d3b55b5c25266f2493bda98b180f3"),
        (
            {"area": 300 * 300, "step": 8, "max_aspect": 3.0},
            "0cc0d2ce7926781b6e13f8a8653d81dff040d75dee9f77f088479bdaa4f37f61",
        ),
    ],
)
def test_our_own_rule_gives_what_it_gave(settings: dict[str, Any], digest: str) -> None:
    """Another geometry of an image is another key. The buckets were compared with all that the definition allows."""
    rule = BucketRule(BucketsConfig(**settings))
    lines = [line(size, rule.geometry(size)) for size in recorded_sizes()]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == digest


def test_ties_go_to_the_larger_area_then_the_smaller_height() -> None:
    assert assign(Size(500, 500), (Size(512, 512), Size(1024, 1024))) == Size(1024, 1024)
    assert assign(Size(500, 500), (Size(1216, 832), Size(832, 1216))) == Size(832, 1216)


@pytest.mark.parametrize(
    ("config", "size", "filter_name"),
    [
        (BucketsConfig(rule="kohya"), Size(2000, 3000), "opencv-area"),
        (BucketsConfig(rule="kohya"), Size(200, 300), "lanczos"),
        (BucketsConfig(rule="kohya"), Size(1024, 1024), "lanczos"),  # nothing is resized
        (BucketsConfig(rule="simpletuner"), Size(2000, 3000), "opencv-linear"),
        (BucketsConfig(rule="onetrainer"), Size(2000, 3000), "bilinear"),
        (BucketsConfig(rule="diffusers"), Size(2000, 3000), "lanczos"),
        (BucketsConfig(rule="diffusers", resample="bilinear"), Size(2000, 3000), "bilinear"),
        (BucketsConfig(rule="diffusers", sizes=((832, 1248),)), Size(2000, 3000), "bilinear"),
    ],
)
def test_each_rule_resizes_with_its_trainers_filter(config: BucketsConfig, size: Size, filter_name: str) -> None:
    rule = BucketRule(config)
    geometry = rule.geometry(size)
    assert geometry is not None and rule.resample(geometry) == filter_name


def test_an_image_that_is_a_line_has_no_bucket() -> None:
    assert BucketRule(BucketsConfig(rule="simpletuner")).geometry(Size(20_000, 90)) is None


def noise(size: Size) -> np.ndarray:
    """The same pixels on every machine."""
    data = hashlib.shake_256(f"{size.height}x{size.width}".encode()).digest(size.height * size.width * 3)
    return np.frombuffer(data, np.uint8).reshape(*size, 3)


@pytest.mark.parametrize("case", json.loads((DATA / "resized_pixels.json").read_text())["cases"])
def test_pixels_are_those_of_the_trainer_bit_for_bit(case: dict[str, Any]) -> None:
    size, resized = Size(*case["size"]), Size(*case["resized"])
    shrinks = resized.height <= size.height and resized.width <= size.width
    name = "opencv-linear" if case["rule"] == "simpletuner" else "opencv-area" if shrinks else "lanczos"
    got = np.ascontiguousarray(resize(noise(size), resized, name))
    assert got.shape == (*resized, 3) and got.dtype == np.uint8
    assert hashlib.sha256(got.tobytes()).hexdigest() == case["sha256"]
