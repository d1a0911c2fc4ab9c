"""What a run keeps in memory of a long dataset."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from helpers.photo_files import write_photo

from latentcache import Config, run_precache
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.identity import digest

NUM_ROWS = 8_000


def peak_of_a_plan(config: Config) -> int:
    tracemalloc.start()
    report = run_precache(config, dry_run=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.num_samples == len(list(Path(config.datasets[0].source.path).rglob("*.png")))
    return peak


def test_one_new_photo_takes_no_memory_for_each_known_sample(make_config: Callable[..., Config], photos: Path) -> None:
    """It made objects of the whole last manifest: 155 MB for a hundred thousand samples."""
    config = make_config()
    run_precache(config)
    folder = ManifestFolder(Path(config.cache.path) / "manifests")
    manifest = folder.read("photos")
    assert manifest is not None
    rows, first = dict(manifest.rows), manifest.rows["a.png"]
    for number in range(NUM_ROWS):
        source = digest(b"%d" % number)
        images = tuple(replace(ref, key=digest(f"{source} {ref.key}".encode())) for ref in first.images)
        rows[f"gone/{number}.png"] = replace(first, sample_id=f"gone/{number}.png", source=source, images=images)
    folder.write(replace(manifest, rows=rows))
    known = peak_of_a_plan(config)
    write_photo(photos / "new.png", 77, (80, 144))
    new = peak_of_a_plan(config)
    assert new - known < 200 * NUM_ROWS, "the ids of the samples, and nothing else of them"
