"""The alpha masks in kohya's files: they become the masks of samples, and those are written as alpha masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.foreign_files import split
from helpers.kohya_files import dialect_a, dialect_b, latents_name, latents_of, text_of, write_npz
from helpers.photo_files import write_photo

from latentcache.interop.formats import kohya, webdataset
from latentcache.interop.formats.kohya import KohyaCache
from latentcache.interop.importing import import_cache
from latentcache.loading.cache import LatentCache
from latentcache.precache.workspace import Workspace

SHADES = np.random.default_rng(3).integers(0, 256, (8, 16)).astype(np.float32) / np.float32(255)
"""Of a mask whose number for each latent is exact."""
MASK = SHADES.repeat(8, axis=0).repeat(8, axis=1)
BYTES = torch.from_numpy((SHADES * 255).round().astype(np.uint8))[None]


def write_sample(folder: Path, stem: str, dialect: Any = dialect_a, **more: np.ndarray) -> None:
    """A photo of 320 x 160 pixels, its latents for a bucket of 128 x 64 pixels, and a text."""
    write_photo(folder / f"{stem}.png", len(stem), (160, 320))
    arrays = dialect_a(len(stem), 320, 160, (128, 64), latents_flipped=latents_of(9, 64, 128), **more)
    write_npz(folder / latents_name(stem, 320, 160), dialect_b(arrays) if dialect is dialect_b else arrays)
    write_npz(folder / f"{stem}_te_outputs.npz", text_of(len(stem)))


def imported(folder: Path) -> tuple[LatentCache, Any]:
    workspace = Workspace()
    report = import_cache(KohyaCache(folder), workspace, name="kohya")
    return LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True, manifest="kohya"), report


@pytest.mark.parametrize("dialect", [dialect_a, dialect_b])
def test_an_alpha_mask_is_the_mask_of_its_sample(tmp_path: Path, dialect: Any) -> None:
    write_sample(tmp_path, "cat", dialect, alpha_mask=MASK)
    write_sample(tmp_path, "other", dialect)
    cache, report = imported(tmp_path)
    # Latents, their mirrored twins, texts, and the masks of one sample.
    assert report.refused == [] and report.num_unverified == 4 + 2 + 2
    assert report.notes == {kohya.NOTE_MASK: 2}
    for flip in (False, True):
        batch = cache.batch(["cat.png"], device="cpu", flip=flip)
        assert torch.equal(batch["mask"][0], BYTES.flip(-1) if flip else BYTES)
        assert "mask" not in cache.batch(["other.png"], device="cpu", flip=flip)
    manifest = cache.manifest("kohya")
    assert manifest.common["parts"] == [{"name": "mask", "downscale": 8}]
    (plain, flipped), images = manifest.rows["cat.png"].parts, manifest.rows["cat.png"].images
    assert [ref.geometry for ref in (plain, flipped)] == [ref.geometry for ref in images]
    assert plain.source == manifest.rows["cat.png"].source and {plain.trust, flipped.trust} == {"unverified"}


def test_a_number_is_the_mean_of_the_pixels_of_its_latent(tmp_path: Path) -> None:
    """As `interpolate(..., mode="area")` of kohya's masked loss, in steps of 1/255."""
    pixels = np.random.default_rng(4).random((64, 128), dtype=np.float32)
    write_sample(tmp_path, "cat", alpha_mask=pixels)
    cache, _ = imported(tmp_path)
    mask = cache.batch(["cat.png"], device="cpu")["mask"].float() / 255
    wanted = torch.nn.functional.interpolate(torch.from_numpy(pixels)[None, None], size=(8, 16), mode="area")
    torch.testing.assert_close(mask, wanted, rtol=0, atol=0.501 / 255)


@pytest.mark.parametrize("dialect", [dialect_a, dialect_b])
def test_an_export_gives_the_files_back(tmp_path: Path, dialect: Any) -> None:
    write_sample(tmp_path / "made", "cat", dialect, alpha_mask=MASK)
    write_sample(tmp_path / "made", "other", dialect)
    cache, _ = imported(tmp_path / "made")
    report = kohya.export(cache, "kohya", tmp_path / "out", with_resolution=dialect is dialect_b)
    assert (report.num_images, report.num_texts, report.skipped) == (4, 2, [])
    for path in (tmp_path / "made").glob("*.npz"):
        with np.load(path) as before, np.load(tmp_path / "out" / path.name) as after:
            assert set(before) == set(after)
            for key in before:
                assert before[key].dtype == after[key].dtype and np.array_equal(before[key], after[key]), key


def test_a_format_without_masks_leaves_such_samples_out(tmp_path: Path) -> None:
    write_sample(tmp_path / "made", "cat", alpha_mask=MASK)
    cache, _ = imported(tmp_path / "made")
    (refusal,) = webdataset.export(cache, "kohya", tmp_path / "out").skipped
    assert refusal.reason == "has-parts" and "it has mask" in refusal.detail


def test_a_damaged_mask_skips_its_sample(tmp_path: Path) -> None:
    for stem in ("cat", "other"):
        write_sample(tmp_path / "made", stem, alpha_mask=MASK if stem == "cat" else 1 - MASK)
    workspace = Workspace()
    import_cache(KohyaCache(tmp_path / "made"), workspace, name="kohya")
    cache = LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True)
    (ref, _) = cache.manifest("kohya").rows["cat.png"].parts
    workspace.store.remove(workspace.store.find([ref.key]))
    report = kohya.export(cache, "kohya", tmp_path / "out")
    assert [(refusal.sample_id, refusal.reason) for refusal in report.skipped] == [("cat.png", "missing")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        latents_name("other", 320, 160),
        "other_te_outputs.npz",
    ]


@pytest.mark.parametrize(
    "mask",
    [MASK[:, :-8], MASK[None], MASK * 2, MASK - 0.1, np.full_like(MASK, np.nan), MASK.astype(np.float64)],
    ids=["size", "dimensions", "above", "below", "nan", "dtype"],
)
def test_a_mask_of_another_form_is_refused(tmp_path: Path, mask: np.ndarray) -> None:
    write_sample(tmp_path, "cat", alpha_mask=mask)
    found, _, (refusal,) = split(KohyaCache(tmp_path))
    assert found == [] and refusal.reason == "corrupt" and "mask is" in refusal.detail
