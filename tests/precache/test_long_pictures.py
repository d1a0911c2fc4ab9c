"""What a run says of images that lose most of themselves, and what a batch says of the crop of mirrored ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from helpers.photo_files import write_photo

from latentcache import Config, LatentCache, run_precache

CUT = ["long.png", "tall.png"]


def test_images_that_lose_more_than_half_are_named(make_config: Callable[..., Config], photos: Path) -> None:
    for name, size in (("long.png", (64, 500)), ("tall.png", (500, 64))):
        write_photo(photos / name, 7, size)
    for dry_run in (True, False):
        report = run_precache(make_config(), dry_run=dry_run)
        assert report.num_mostly_cut == 2 and sorted(report.mostly_cut) == CUT
        assert (
            "2 images lose more than half in the crop: long.png, tall.png; raise buckets.max_aspect" in report.to_text()
        )
        assert report.to_json()["mostly_cut"] == report.mostly_cut
    for number in range(5):
        write_photo(photos / f"more{number}.png", number, (64, 500))
    report = run_precache(make_config(), dry_run=True)
    assert report.num_mostly_cut == 7 and len(report.mostly_cut) == 5 and ", ...; raise" in report.to_text()


def test_a_mirrored_sample_has_the_crop_of_the_mirrored_image(make_config: Callable[..., Config], photos: Path) -> None:
    """diffusers' script mirrors 64 x 67 first, and then crops it at 2 of 3."""
    for path in photos.rglob("*.*"):
        path.unlink()
    write_photo(photos / "a.png", 1, (64, 67))
    changes = {"datasets.0.flip": True, "datasets.0.buckets": {"rule": "diffusers", "resolution": 64}}
    config = make_config(**changes)
    run_precache(config)
    with LatentCache(config.cache.path, manifest="photos") as cache:
        plain, mirrored = (cache.batch(["a.png"], device="cpu", flip=flip) for flip in (False, True))
    assert plain["crop_top_left"] == [(0, 2)] and mirrored["crop_top_left"] == [(0, 2)]
    expected = torch.tensor([[64, 67, 0, 2, 64, 64]], dtype=torch.float32)
    assert torch.equal(plain["add_time_ids"], expected) and torch.equal(mirrored["add_time_ids"], expected)
