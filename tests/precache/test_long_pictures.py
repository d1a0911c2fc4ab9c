"""What a run says of images that lose most of themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from helpers.photo_files import write_photo

from latentcache import Config, run_precache

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
