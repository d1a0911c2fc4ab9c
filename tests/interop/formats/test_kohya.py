"""The caches of kohya's sd-scripts: files of the specification are read and written, others are refused by name."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.foreign_samples import imported, split
from helpers.kohya_files import dialect_a, dialect_b, latents_name, latents_of, text_of, write_npz
from helpers.photo_files import write_photo

from latentcache.errors import ConfigError
from latentcache.interop.formats import kohya
from latentcache.interop.formats.kohya import KohyaCache
from latentcache.interop.readers import ForeignImage, layouts_of
from latentcache.loading.cache import LatentCache
from latentcache.precache.run import run_precache
from latentcache.types import Crop, Geometry, Refusal, Size

# Samples as kohya writes them: photos of 320 x 160 pixels for a bucket of 128 x 64 pixels (width, height)


def write_sample(folder: Path, stem: str, dialect: Any = dialect_a, **more: np.ndarray) -> None:
    """A photo, and its files for SDXL."""
    write_photo(folder / f"{stem}.png", len(stem), (160, 320))
    arrays = dialect_a(len(stem), 320, 160, (128, 64), latents_flipped=latents_of(9, 64, 128), **more)
    write_npz(folder / latents_name(stem, 320, 160), dialect_b(arrays) if dialect is dialect_b else arrays)
    write_npz(folder / f"{stem}_te_outputs.npz", text_of(len(stem), np.float16))


def flux_text(seed: int, **more: Any) -> dict[str, np.ndarray]:
    """The arrays of a text for FLUX.1, of widths 24 and 16 instead of 4096 and 768."""
    generator, length = np.random.default_rng(seed), 512
    return {
        "l_pooled": generator.normal(size=16).astype(np.float32),
        "t5_out": generator.normal(size=(length, 24)).astype(np.float32),
        "txt_ids": np.zeros((length, 3), np.float32),
        "t5_attn_mask": (np.arange(length) < 9).astype(np.int64),
        "apply_t5_attn_mask": np.array(False),
        **more,
    }


def write_flux(folder: Path, names: list[str]) -> None:
    for seed, name in enumerate(names):
        write_photo(folder / f"{name}.png", seed, (160, 320)).with_suffix(".txt").write_text(f"of {name}")
        latents = np.random.default_rng(seed).normal(size=(16, 8, 16)).astype(np.float32)
        arrays = dialect_a(seed, 320, 160, (128, 64), latents=latents)
        write_npz(folder / f"{name}_0320x0160_flux.npz", dialect_b(arrays))
        write_npz(folder / f"{name}_flux_te.npz", flux_text(seed))


SHADES = np.random.default_rng(3).integers(0, 256, (8, 16)).astype(np.float32) / np.float32(255)
MASK = SHADES.repeat(8, axis=0).repeat(8, axis=1)
"""A mask whose value for each latent is exact."""


def test_dialect_a_with_its_flipped_twin(tmp_path: Path) -> None:
    write_photo(tmp_path / "sub" / "cat.png", 0, (600, 300))
    arrays = dialect_a(1, 300, 600, (64, 64), latents_flipped=latents_of(2, 64, 64))
    path = write_npz(tmp_path / "sub" / latents_name("cat", 300, 600), arrays)
    plain, flipped = KohyaCache(tmp_path).items()
    assert isinstance(plain, ForeignImage) and isinstance(flipped, ForeignImage)
    for item, name in ((plain, "latents"), (flipped, "latents_flipped")):
        assert item.sample_id == "sub/cat.png" and item.path == str(path)
        assert item.image_path == tmp_path / "sub" / "cat.png"
        assert item.latents.dtype is torch.float32 and torch.equal(item.latents, torch.from_numpy(arrays[name]))
        assert not item.is_scaled and item.output == "sample" and item.note is None
    # The place of the whole image in the bucket, which is not the crop.
    assert arrays["crop_ltrb"].tolist() == [16, 0, 48, 64]
    assert plain.geometry == Geometry(Size(600, 300), Size(128, 64), Crop(32, 0), Size(64, 64))
    assert flipped.geometry == Geometry(Size(600, 300), Size(128, 64), Crop(32, 0), Size(64, 64), flip=True)


def test_dialect_b_gives_one_of_its_resolutions(tmp_path: Path) -> None:
    write_photo(tmp_path / "cat.png", 0, (160, 320))
    small, large = dialect_a(1, 320, 160, (64, 32)), dialect_a(2, 320, 160, (128, 64))
    write_npz(tmp_path / latents_name("cat", 320, 160), dialect_b(small) | dialect_b(large))
    [largest] = KohyaCache(tmp_path).items()
    assert isinstance(largest, ForeignImage)
    assert torch.equal(largest.latents, torch.from_numpy(large["latents"]))
    assert largest.geometry.target_size == Size(64, 128) and largest.note == kohya.NOTE_OTHERS


def test_a_text_is_both_encoders_side_by_side_and_its_images_may_be_elsewhere(tmp_path: Path) -> None:
    images, arrays = tmp_path / "images", text_of(3)
    for suffix in (".png", ".jpg"):
        write_photo(images / f"sub/cat{suffix}", 0)
    (images / "sub/cat.txt").write_text("a cat\nanother caption\n")
    write_npz(tmp_path / "cache/sub/cat_te_outputs.npz", arrays)
    _, [text], _ = split(KohyaCache(tmp_path / "cache", images=images))
    assert text.sample_ids == ("sub/cat.jpg", "sub/cat.png")
    assert (text.caption, text.note) == ("a cat", kohya.NOTE_FIRST_LINE)
    assert text.prompt_embeds.shape == (77, 2048) and text.pooled_prompt_embeds is not None
    assert np.array_equal(text.prompt_embeds[:, :768].numpy(), arrays["hidden_state1"])
    assert np.array_equal(text.prompt_embeds[:, 768:].numpy(), arrays["hidden_state2"])
    assert np.array_equal(text.pooled_prompt_embeds.numpy(), arrays["pool2"])


# Refusals

GOOD = dialect_a(1, 320, 160, (128, 64))
NAME = latents_name("cat", 320, 160)
TEXT, FLUX = "cat_te_outputs.npz", "cat_flux_te.npz"
BAD_MASKS = (MASK[:, :-8], MASK[None], MASK * 2, MASK - 0.1, np.full_like(MASK, np.nan))


@pytest.mark.parametrize(
    ("name", "arrays", "reason", "detail"),
    [
        (NAME, {"original_size": GOOD["original_size"]}, "unsupported-format", "holds no latents"),
        (NAME, {"latents": GOOD["latents"]}, "corrupt", "has no original_size"),
        (NAME, GOOD | {"latents": GOOD["latents"][0]}, "corrupt", "with 3 dimensions"),
        (NAME, GOOD | {"original_size": np.array([-320, 160])}, "corrupt", "original_size is"),
        (NAME, GOOD | {"original_size": np.array([160, 320])}, "corrupt", "its name says an image of 160x320"),
        (latents_name("cat", 640, 160), dialect_a(1, 640, 160, (128, 64)), "changed", "cat.png is 160x320"),
        ("cat_0320x0160_sd3.npz", GOOD, "unsupported-format", "architecture is sd3"),
        *((NAME, GOOD | {"alpha_mask": mask}, "corrupt", "mask is") for mask in BAD_MASKS),
        (TEXT, text_of(0, length=154), "unsupported-format", r"need 77 or 152 or 227 rows \(max_token"),
        (TEXT, text_of(0) | {"hidden_state2": text_of(0, length=152)["hidden_state2"]}, "unsupported-format", "both"),
        (TEXT, text_of(0) | {"pool2": np.zeros(1280, np.float16)}, "corrupt", "its dtypes are"),
        (FLUX, flux_text(0, apply_t5_attn_mask=np.array(True)), "unsupported-format", "FLUX.1 does not mask padding"),
        (FLUX, flux_text(0, apply_t5_attn_mask=np.array(0)), "corrupt", "it must be one bool"),
        (FLUX, flux_text(0, t5_attn_mask=np.ones(3, np.int64)), "corrupt", "do not match"),
    ],
)
def test_odd_files_are_refused_by_name(tmp_path: Path, name: str, arrays: Any, reason: str, detail: str) -> None:
    if name != FLUX:  # also without any image
        write_photo(tmp_path / "cat.png", 0, (160, 320))
    path = write_npz(tmp_path / name, arrays)
    [refusal] = KohyaCache(tmp_path, family="flux" if name == FLUX else None).items()
    assert isinstance(refusal, Refusal) and refusal.path == str(path) and refusal.reason == reason
    assert re.search(detail, refusal.detail)


@pytest.mark.parametrize("made", ["dialect a", "dialect b", "flux"])
def test_an_export_gives_the_files_back(tmp_path: Path, made: str) -> None:
    if made == "flux":
        write_flux(tmp_path / "made", ["a", "sub/b"])
    else:
        dialect = dialect_b if made.endswith("b") else dialect_a
        write_sample(tmp_path / "made", "sub/cat", dialect, alpha_mask=MASK)
        write_sample(tmp_path / "made", "other", dialect)
    cache, _ = imported(KohyaCache(tmp_path / "made"), "kohya")
    report = kohya.export(cache, "kohya", tmp_path / "out", with_resolution=made == "dialect b")
    assert (report.num_images, report.num_texts, report.skipped) == (2 if made == "flux" else 4, 2, [])
    assert report.num_other_buckets == 0 and report.buckets == {}  # kohya's own need no check
    assert report.notes == ({kohya.NOTE_MASK_UNKNOWN: 2} if made == "flux" else {})
    paths = [path.relative_to(tmp_path / "made") for path in (tmp_path / "made").rglob("*.npz")]
    assert len(paths) == report.num_files == 4
    for path in paths:
        with np.load(tmp_path / "made" / path) as before, np.load(tmp_path / "out" / path) as after:
            assert set(before) == set(after)
            for name in before:
                assert before[name].dtype == after[name].dtype and before[name].shape == after[name].shape
                if made == "flux" and name.startswith("latents"):  # unscaled and scaled again
                    np.testing.assert_allclose(before[name], after[name], rtol=1e-6, atol=1e-6)
                elif name != "t5_attn_mask":
                    np.testing.assert_array_equal(before[name], after[name], name)


@pytest.mark.filterwarnings("ignore")  # of its own
@pytest.mark.skipif("SD_SCRIPTS" not in os.environ, reason="SD_SCRIPTS is not set to a checkout of kohya-ss/sd-scripts")
def test_sd_scripts_own_code_reads_an_export(make_config: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Its strategies find each file by the image's name and size, and read the values of the cache."""
    config = make_config(**{"datasets.0.flip": True})
    run_precache(config)
    for name in ("library.utils", "library.train_util"):  # stand-ins
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(setup_logging=lambda *given, **named: None))
    monkeypatch.syspath_prepend(os.environ["SD_SCRIPTS"])
    from library.strategy_sd import SdSdxlLatentsCachingStrategy
    from library.strategy_sdxl import SdxlTextEncoderOutputsCachingStrategy

    latents = SdSdxlLatentsCachingStrategy(False, True, 1, False)
    texts = SdxlTextEncoderOutputsCachingStrategy(True, 1, False)
    with LatentCache(config.cache.path, manifest="photos") as cache:
        kohya.export(cache, "photos", tmp_path)
        for sample_id in cache.sample_ids():
            _, row = cache.row(sample_id)
            geometry, image = row.images[0].geometry, str(tmp_path / sample_id)
            size, bucket = geometry.original_size[::-1], geometry.target_size[::-1]  # (width, height) in sd-scripts
            path = latents.get_latents_npz_path(image, size)
            assert latents.is_disk_cached_latents_expected(bucket, path, True, False)
            found, original, crop, mirrored, mask = latents.load_latents_from_disk(path, bucket)
            for values, flip in ((found, False), (mirrored, True)):
                expected = cache.batch([sample_id], device="cpu", flip=flip)["latents"][0]
                assert np.array_equal(values, expected.numpy())
            assert tuple(original) == size and mask is None and len(crop) == 4
            path = texts.get_outputs_npz_path(image)
            assert texts.is_disk_cached_outputs_expected(path)
            *hidden, pooled = texts.load_outputs_npz(path)
            expected = cache.batch([sample_id], device="cpu")
            assert np.array_equal(np.concatenate(hidden, axis=1), expected["prompt_embeds"][0].numpy())
            assert np.array_equal(pooled, expected["pooled_prompt_embeds"][0].numpy())


def test_an_alpha_mask_is_the_mask_of_its_sample(tmp_path: Path) -> None:
    """The same as `interpolate(..., mode="area")` in kohya's masked loss, in steps of 1/255."""
    pixels = np.random.default_rng(4).random((64, 128), dtype=np.float32)
    write_sample(tmp_path, "cat", alpha_mask=pixels)
    write_sample(tmp_path, "other")
    cache, report = imported(KohyaCache(tmp_path), "kohya")
    assert report.refused == [] and report.num_images == 4
    assert report.notes == {kohya.NOTE_MASK: 2}
    wanted = torch.nn.functional.interpolate(torch.from_numpy(pixels)[None, None], size=(8, 16), mode="area")
    for flip in (False, True):
        mask = cache.batch(["cat.png"], device="cpu", flip=flip)["mask"].float() / 255
        torch.testing.assert_close(mask, wanted.flip(-1) if flip else wanted, rtol=0, atol=0.501 / 255)
        assert "mask" not in cache.batch(["other.png"], device="cpu", flip=flip)
    manifest = cache.manifest("kohya")
    assert manifest.common["parts"] == [{"name": "mask", "downscale": 8}]
    (plain, flipped), images = manifest.rows["cat.png"].parts, manifest.rows["cat.png"].images
    assert [ref.geometry for ref in (plain, flipped)] == [ref.geometry for ref in images]
    assert plain.source == manifest.rows["cat.png"].source and {plain.trust, flipped.trust} == {"unverified"}


def test_the_files_of_an_unusable_image_are_refused(tmp_path: Path) -> None:
    """They were once imported as a sample `cat` without a caption, next to the dataset's own `cat.png`."""
    for stem in ("cat", "dog"):
        write_sample(tmp_path, stem)
    (tmp_path / "cat.txt").write_bytes(b"caf\xe9")  # Latin-1
    (tmp_path / "dog.txt").write_text("a dog")
    images, texts, refused = split(KohyaCache(tmp_path))
    assert {each.sample_id for each in images} == {"dog.png"} and [each.sample_ids for each in texts] == [("dog.png",)]
    assert [each.reason for each in refused] == ["bad-caption"] * 2 and "not UTF-8" in refused[0].detail


def test_a_folder_with_files_of_several_families_needs_the_family(tmp_path: Path) -> None:
    write_flux(tmp_path, ["a"])
    for architecture in ("sdxl", "sd"):
        write_npz(tmp_path / f"a_0320x0160_{architecture}.npz", dialect_a(0, 320, 160, (128, 64)))
    write_npz(tmp_path / "a_te_outputs.npz", text_of(0))
    with pytest.raises(ConfigError, match="of sdxl, sd15, flux; choose one with --family"):
        KohyaCache(tmp_path)
    for family, channels in (("sdxl", 4), ("sd15", 4), ("flux", 16)):
        (image,), texts, refused = split(KohyaCache(tmp_path, family=family))
        assert image.latents.shape[0] == channels and image.is_scaled == (family == "flux")
        suffix = layouts_of("kohya")[family].text_suffix
        assert [each.path.endswith(suffix) for each in texts] == ([] if family == "sd15" else [True])
        assert [each.reason for each in refused] == ["unsupported-format"] * (4 - len(texts))
    cache, _ = imported(KohyaCache(tmp_path, family="sd15"))
    assert cache.scaling(cache.manifest("foreign")).scaling_factor == 0.18215
