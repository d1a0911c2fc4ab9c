"""What all exports share: skipped samples, values, and atomic files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.foreign_samples import Foreign, image, imported, of_family, pairs, text

from latentcache.config import Config
from latentcache.dataset.row_table import Ref
from latentcache.errors import ReadOnlyError
from latentcache.interop.exporting import NOTE_FIRST_CAPTION
from latentcache.interop.formats import kohya, musubi, webdataset
from latentcache.loading.cache import LatentCache
from latentcache.precache.run import run_precache

ALL = pytest.mark.parametrize("module", [kohya, musubi, webdataset], ids=["kohya", "musubi", "webdataset"])


def cache_for(module: Any, *sample_ids: str) -> LatentCache:
    """Samples of a family that the format supports."""
    if module is musubi:
        return imported(Foreign(of_family("z-image", *sample_ids), family="z-image"))[0]
    return imported(Foreign(pairs(*sample_ids), "kohya"))[0]


@ALL
def test_what_cannot_be_exported_is_listed_and_the_rest_exported(tmp_path: Path, module: Any) -> None:
    """No file is written outside of the folder either."""
    role, outside = "mask" if module is musubi else "control 1", ["../up.png", "/abs.png", "a/../../up.png"]
    cache = cache_for(module, *outside, "half \ud83d.png", "no-image.png", "no-text.png", "part.png", "whole.png")
    manifest = cache.manifest("foreign")
    rows = dict(manifest.rows)
    image_of, row = rows["no-image.png"].images[0], rows["part.png"]
    part = Ref(row.images[0].key, row.images[0].geometry, "unverified", role, "0" * 64)
    cache.manifests.write(replace(manifest, rows=rows | {"part.png": replace(row, parts=(part,))}))
    cache.refresh()
    cache.store.remove(cache.store.find([image_of.key, rows["no-text.png"].captions[0].key]))
    report = module.export(cache, "foreign", tmp_path / "in" / "out")
    details = {each.sample_id: each.detail for each in report.skipped}
    assert {each.sample_id: each.reason for each in report.skipped} == {
        **dict.fromkeys([*outside, "half \ud83d.png"], "unreadable"),
        **dict.fromkeys(["no-image.png", "no-text.png"], "missing"),
        "part.png": "has-parts",
    }
    assert "its name is not UTF-8" in details["half \ud83d.png"] and "not a path inside" in details["/abs.png"]
    assert "which the format cannot hold" in details["part.png"]
    assert (report.num_images, report.num_texts, report.num_unread) == (1, 1, 2)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and {path.parent for path in files} == {tmp_path / "in" / "out"}
    half = [*pairs("a.png"), image("b.png"), text("b.png", caption="half \ud83d a pair")]
    report = kohya.export(imported(Foreign(half, "kohya"))[0], "foreign", tmp_path / "captions")
    assert [(each.sample_id, each.detail) for each in report.skipped] == [("b.png", "a caption is not UTF-8")]


def test_the_mean_of_moments_is_written(make_config: Callable[..., Config], tmp_path: Path) -> None:
    config = make_config(**{"validation.prompts": [], "datasets.0.flip": True})
    run_precache(config)
    with LatentCache(config.cache.path) as cache:
        report = kohya.export(cache, "photos", tmp_path / "out", with_resolution=True)
        assert (report.num_images, report.skipped, report.notes[NOTE_FIRST_CAPTION]) == (10, [], 1)
        for row in cache.manifest("photos").rows.values():
            (path,) = (tmp_path / "out").glob(f"{row.sample_id.removesuffix('.png')}_*_sdxl.npz")
            arrays = np.load(path)
            for ref in row.images:
                moments = cache.get(ref.key).tensors["moments"]
                name = f"latents{'_flipped' * ref.geometry.flip}_{moments.shape[1]}x{moments.shape[2]}"
                assert np.array_equal(arrays[name], moments[:4].float().numpy())


def test_existing_files_are_kept_without_overwrite(tmp_path: Path) -> None:
    cache = cache_for(kohya, "a.png")
    kohya.export(cache, "foreign", tmp_path)
    files = sorted(tmp_path.iterdir())
    files[0].write_bytes(b"mine")
    again = kohya.export(cache, "foreign", tmp_path)
    assert files[0].read_bytes() == b"mine" and again.num_files == 0
    assert {each.reason for each in again.skipped} == {"duplicate"} and "give --overwrite" in again.to_text()
    assert {each.path for each in again.skipped} == set(map(str, files))
    assert kohya.export(cache, "foreign", tmp_path, overwrite=True).skipped == []
    assert files[0].read_bytes() != b"mine"


def test_two_samples_never_share_a_file(tmp_path: Path) -> None:
    """Names may differ only by case, on a file system that ignores it. Here two folders are one."""
    cache = cache_for(kohya, "a/x.png", "b/x.png")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for _ in range(2):
        report = kohya.export(cache, "foreign", tmp_path, overwrite=True)
        skipped = {(each.sample_id, each.detail) for each in report.skipped}
        assert skipped == {("b/x.png", "another sample has this file")}
        assert (report.num_images, report.num_texts) == (1, 1)


def test_a_full_disk_ends_the_export_and_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a shard is open while samples are read."""
    cache = cache_for(webdataset, "a.png", "b.png")
    get, calls = cache.get, iter(range(2))

    def fails(*arguments: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            raise ReadOnlyError(tmp_path)
        return get(*arguments, **options)

    monkeypatch.setattr(cache, "get", fails)
    with pytest.raises(ReadOnlyError):
        webdataset.export(cache, "foreign", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
