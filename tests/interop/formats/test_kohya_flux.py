"""kohya's files of FLUX.1 and SD 1.5: scaled latents, T5 without its mask, and which family a folder is of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.foreign_files import reasons, split
from helpers.foreign_samples import imported
from helpers.kohya_files import dialect_a, dialect_b, text_of, write_npz
from helpers.photo_files import write_photo
from helpers.tiny_models import tiny_folder

from latentcache.config import Config
from latentcache.errors import ConfigError, DatasetError
from latentcache.interop.formats import kohya
from latentcache.interop.formats.kohya import KohyaCache
from latentcache.loading.cache import LatentCache
from latentcache.precache.run import run_precache

WIDTHS = (24, 16)
"""Of T5 and CLIP; 4096 and 768 in earnest."""


def latents_of(seed: int, channels: int = 16, std: float = 1.0) -> np.ndarray:
    """float32, of a bucket of 128 x 64 pixels (width, height)."""
    return np.random.default_rng(seed).normal(0, std, (channels, 8, 16)).astype(np.float32)


def flux_text(seed: int, length: int = 512, dtype: type = np.float32, **more: Any) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        "l_pooled": generator.normal(size=WIDTHS[1]).astype(dtype),
        "t5_out": generator.normal(size=(length, WIDTHS[0])).astype(dtype),
        "txt_ids": np.zeros((length, 3), dtype),
        "t5_attn_mask": (np.arange(length) < 9).astype(np.int64),
        "apply_t5_attn_mask": np.array(False),
        **more,
    }


def write_flux(folder: Path, names: str = "ab", *, captions: bool = True) -> None:
    """Photos of 320 x 160 pixels, and kohya's files next to them."""
    for seed, name in enumerate(names):
        write_photo(folder / f"{name}.png", seed, (160, 320))
        if captions:
            (folder / f"{name}.txt").write_text(f"of {name}")
        arrays = dialect_a(seed, 320, 160, (128, 64), latents=latents_of(seed))
        write_npz(folder / f"{name}_0320x0160_flux.npz", dialect_b(arrays))
        write_npz(folder / f"{name}_flux_te.npz", flux_text(seed))


def test_an_export_has_the_names_and_values_of_what_was_imported(tmp_path: Path) -> None:
    write_flux(tmp_path / "made")
    cache, _ = imported(KohyaCache(tmp_path / "made"))
    report = kohya.export(cache, "foreign", tmp_path / "again")
    assert (report.num_images, report.num_texts, report.skipped) == (2, 2, [])
    assert report.notes[kohya.NOTE_MASK_UNKNOWN] == 2
    for path in sorted((tmp_path / "again").iterdir()):
        found, expected = np.load(path), np.load(tmp_path / "made" / path.name)
        assert set(found.files) == set(expected.files)
        for name in found.files:
            assert found[name].dtype == expected[name].dtype and found[name].shape == expected[name].shape
            if name.startswith("latents"):  # the shift was subtracted and added again
                np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, atol=1e-6)
            elif name != "t5_attn_mask":
                np.testing.assert_array_equal(found[name], expected[name])
    again, report = imported(KohyaCache(tmp_path / "again", images=tmp_path / "made"))
    assert not report.refused
    texts = [{row.captions[0].key for row in each.manifest("foreign").rows.values()} for each in (cache, again)]
    assert texts[0] == texts[1]


def test_the_mask_of_texts_that_were_counted_is_written(make_config: Callable[..., Config], tmp_path: Path) -> None:
    config = make_config(**{"model.path": tiny_folder("flux"), "validation.prompts": []})
    run_precache(config)
    with LatentCache(config.cache.path) as cache:
        report = kohya.export(cache, "photos", tmp_path / "out")
        assert report.num_texts == 5 and kohya.NOTE_MASK_UNKNOWN not in report.notes
        entry = cache.get(cache.row("a.png")[1].captions[0].key)
    arrays = np.load(tmp_path / "out/a_flux_te.npz")
    length, num_tokens = len(entry.tensors["prompt_embeds"]), entry.record.provenance["num_tokens"]
    assert 0 < num_tokens < length and not arrays["apply_t5_attn_mask"]
    assert arrays["t5_attn_mask"].tolist() == [1] * num_tokens + [0] * (length - num_tokens)
    assert {arrays[name].dtype.name for name in ("t5_out", "l_pooled", "txt_ids")} == {"float32"}


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        ({"apply_t5_attn_mask": np.array(True)}, "unsupported-format", "apply_t5_attn_mask, and diffusers' FLUX.1 has"),
        ({"apply_t5_attn_mask": np.array([False])}, "corrupt", "it must be one bool"),
        ({"apply_t5_attn_mask": np.array(0)}, "corrupt", "it must be one bool"),
        ({"t5_attn_mask": np.ones(3, np.int64)}, "corrupt", "do not fit together"),
        ({"l_pooled": np.ones(4, np.float16)}, "corrupt", "do not fit together"),
        ({"t5_out": np.ones((2, 3, 4), np.float32)}, "corrupt", "with 2 dimensions"),
        ({"t5_out": np.array([{}], dtype=object)}, "corrupt", "allow_pickle=False"),
    ],
    ids=["with-mask", "mask-of-flags", "flag-of-numbers", "mask", "dtypes", "shape", "objects"],
)
def test_texts_of_another_recipe_or_form_are_refused(
    tmp_path: Path, changes: dict[str, np.ndarray], reason: str, detail: str
) -> None:
    write_npz(tmp_path / "cat_flux_te.npz", flux_text(0, **changes))
    *_, (refusal,) = split(KohyaCache(tmp_path, family="flux"))
    assert refusal.reason == reason and detail in refusal.detail


def test_latents_that_are_not_scaled_are_refused(tmp_path: Path) -> None:
    arrays = dialect_a(0, 320, 160, (128, 64), latents=latents_of(0, std=2.77))
    write_npz(tmp_path / "a_0320x0160_flux.npz", dialect_b(arrays))
    with pytest.raises(DatasetError, match=r"holds scaled flux latents, which have about 1\. Nothing"):
        imported(KohyaCache(tmp_path))


def test_a_folder_with_files_of_two_families_needs_the_family(tmp_path: Path) -> None:
    write_flux(tmp_path, "a")
    write_npz(tmp_path / "a_0320x0160_sdxl.npz", dialect_a(0, 320, 160, (128, 64)))
    write_npz(tmp_path / "a_te_outputs.npz", text_of(0))
    with pytest.raises(ConfigError, match="of sdxl, flux, and a manifest holds one family"):
        KohyaCache(tmp_path)
    for family, channels in (("sdxl", 4), ("flux", 16)):
        (image,), (text,), refused = split(KohyaCache(tmp_path, family=family))
        assert image.latents.shape[0] == channels and image.is_scaled == (family == "flux")
        assert text.path.endswith(kohya.SUFFIXES[family]) and reasons(refused) == ["unsupported-format"] * 2


def test_sd15_has_unscaled_latents_and_no_texts(tmp_path: Path) -> None:
    write_photo(tmp_path / "a.png", 0, (160, 320))
    arrays = dialect_a(0, 320, 160, (128, 64), latents=latents_of(0, channels=4, std=5.5))
    write_npz(tmp_path / "a_0320x0160_sd.npz", arrays)
    cache, report = imported(KohyaCache(tmp_path))
    assert not report.refused and reasons(report.incomplete) == ["missing"]
    manifest = cache.manifest("foreign")
    assert manifest.common["family"] == "sd15" and cache.scaling(manifest).scaling_factor == 0.18215
    stored = cache.get(next(iter(manifest.keys()))).tensors["latents"]
    assert torch.equal(stored, torch.from_numpy(arrays["latents"]))
