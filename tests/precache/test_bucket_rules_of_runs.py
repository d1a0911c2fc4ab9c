"""A run with a trainer's rule of buckets: its sizes, its crop, its pixels, and what it costs to change the rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from helpers.photo_files import write_photo

from latentcache.config import Config, ImagesConfig
from latentcache.dataset.images import decode
from latentcache.dataset.resampling import resize
from latentcache.loading.cache import LatentCache
from latentcache.models.tiny import tiny_parts
from latentcache.models.vae import encode_images
from latentcache.precache.run import run_precache
from latentcache.types import Crop, Geometry, Size

KOHYA = {"rule": "kohya", "resolution": 96, "step": 32, "min_side": 32}


def test_the_latents_are_those_of_the_trainers_own_pixels(make_config: Callable[..., Config], photos: Path) -> None:
    config = make_config(**{"datasets.0.buckets": KOHYA, "datasets.0.flip": True})
    report = run_precache(config)
    assert report.refused == [] and report.num_samples == 5
    with LatentCache(config.cache.path) as cache:
        plain, flipped = cache.row("a.png")[1].images
        geometry = plain.geometry
        assert geometry == Geometry(Size(80, 144), Size(71, 128), Crop(3, 0), Size(64, 128))
        pixels = decode((photos / "a.png").read_bytes(), "a.png", ImagesConfig(min_side=8))
        cropped = resize(pixels, Size(71, 128), "opencv-area")[3:67]
        for ref, wanted in ((plain, cropped), (flipped, cropped[:, ::-1])):
            live = encode_images(tiny_parts()["vae"], np.ascontiguousarray(wanted)[None])[0]
            assert torch.equal(cache.get(ref.key).tensors["moments"], live)
            assert cache.get(ref.key).record.identity["preparation"]["resample"] == "opencv-area"


def test_a_rule_and_its_settings_count_only_where_they_change_the_pixels(
    make_config: Callable[..., Config], photos: Path
) -> None:
    write_photo(photos / "same.png", 9, (96, 96))  # a bucket of every rule: nothing is resized
    assert run_precache(make_config()).num_encoded > 0
    report = run_precache(make_config(**{"datasets.0.buckets": KOHYA}))
    assert report.misses_by_reason == {"resample policy changed (lanczos -> opencv-area and lanczos)": 5}
    # Other settings, the same buckets.
    more = {**KOHYA, "max_side": 512}
    assert run_precache(make_config(**{"datasets.0.buckets": more})).num_encoded == 0
    assert run_precache(make_config()).num_encoded == 0
    own = {"rule": "simpletuner", "resolution": 96, "step": 32}
    report = run_precache(make_config(**{"datasets.0.buckets": own}))
    assert sum(report.misses_by_reason.values()) == 5 and all(
        reason.startswith("resample policy changed") for reason in report.misses_by_reason
    )


def test_an_image_without_a_bucket_is_refused_by_name(make_config: Callable[..., Config], photos: Path) -> None:
    write_photo(photos / "long.png", 9, (20, 140))
    config = make_config(**{"datasets.0.buckets": {**KOHYA, "upscale": False}})
    for _ in range(2):
        [refusal] = run_precache(config).refused
        assert (refusal.sample_id, refusal.reason) == ("long.png", "no-bucket")
        assert "kohya" in refusal.detail and "makes no bucket of an image of 20x140" in refusal.detail
    with LatentCache(config.cache.path) as cache:
        assert sorted(cache.sample_ids()) == ["a.png", "b.png", "c.png", "d.png", "sub/e.png"]
