"""musubi-tuner's files for every family that both have: equal to those of its specification, and what is left out."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers.foreign_samples import BUCKET, Foreign, imported
from safetensors import safe_open
from safetensors.torch import load_file

from latentcache import unpadded
from latentcache.dataset.buckets import fit
from latentcache.dataset.row_table import Ref
from latentcache.families import FAMILIES
from latentcache.interop.formats import musubi
from latentcache.interop.readers import ForeignImage, ForeignItem, ForeignText, layouts_of
from latentcache.loading.cache import LatentCache
from latentcache.types import Size

CAPTIONS = {"cat": "a cat", "dog": "a dog, that sits"}
LAYOUTS = {family: layout for family, layout in layouts_of("musubi").items() if family in FAMILIES}
SHORT = {family: layout.architecture for family, layout in LAYOUTS.items()}
"""Family -> the architecture in the names of its files."""


def latents_of(family: str, seed: int) -> torch.Tensor:
    """Of a bucket of 64 x 128 pixels: [16, h, w], or [16, 1, h, w] with frames; scaled but for z-image."""
    frames = [1] if family in ("qwen-image", "krea2", "wan") else []
    std = 2.8 if family == "z-image" else 1.0  # of unscaled latents of FLUX.1's VAE
    values = torch.randn(16, *frames, 8, 16, generator=torch.Generator().manual_seed(seed)) * std
    return values.to(torch.float32 if family in ("z-image", "flux") else torch.bfloat16)


def texts_of(family: str, seed: int) -> dict[str, torch.Tensor]:
    """Key without dtype -> tensor, of few features: 5 rows and more, which follow from the seed; of FLUX.1 512."""
    generator = torch.Generator().manual_seed(seed)
    names = list(LAYOUTS[family].texts)
    shape = (512 if family == "flux" else 5 + seed, *([3] if family == "krea2" else []), 8)
    found = {names[0]: torch.randn(shape, generator=generator).bfloat16()}
    return found | {name: torch.randn(6, generator=generator).bfloat16() for name in names[1:]}


def cache_of(family: str, folder: str = "") -> LatentCache:
    """A sample for each caption, of an image of 320 x 160 pixels (width, height)."""
    found: list[ForeignItem] = []
    for seed, (stem, caption) in enumerate(CAPTIONS.items()):
        name, is_scaled = f"{folder}{stem}.png", family != "z-image"
        latents, geometry = latents_of(family, seed), fit(Size(160, 320), BUCKET)
        found.append(ForeignImage(name, "f", None, latents, is_scaled, "mean", geometry))
        fields = LAYOUTS[family].texts
        texts = {fields[key]: tensor for key, tensor in texts_of(family, seed).items()}
        found.append(ForeignText((name,), "f", caption, texts["prompt_embeds"], texts.get("pooled_prompt_embeds")))
    cache, report = imported(Foreign(found, family=family))
    assert not report.refused and report.num_samples == 2
    return cache


@pytest.mark.parametrize("family", sorted(set(SHORT) - {"flux", "wan-i2v"}))
def test_the_files_are_as_the_specification_has_them(tmp_path: Path, family: str) -> None:
    """To the last bit, with the names and the metadata that musubi-tuner asks for."""
    dtype, short = latents_of(family, 0).dtype, SHORT[family]
    of_all = {"architecture": LAYOUTS[family].title, "format_version": "1.0.1"}
    expected = {}
    for seed, (stem, caption) in enumerate(CAPTIONS.items()):
        latents, texts = latents_of(family, seed), texts_of(family, seed)
        name = f"latents_1x8x16_{str(dtype).removeprefix('torch.')}"
        size = {"width": "320", "height": "160"}
        expected[f"{stem}_0320x0160_{short}.safetensors"] = {name: latents}, of_all | size
        named = {f"{name}_bfloat16": tensor for name, tensor in texts.items()}
        expected[f"{stem}_{short}_te.safetensors"] = named, of_all | {"caption1": caption}
    report = musubi.export(cache_of(family, "sub/"), "foreign", tmp_path, dtype=dtype)
    assert (report.num_images, report.num_texts, report.num_files, report.skipped) == (2, 2, 4, [])
    assert {path.name for path in tmp_path.iterdir()} == expected.keys()
    for name, (tensors, metadata) in expected.items():
        found = load_file(tmp_path / name)
        assert found.keys() == tensors.keys() and all(torch.equal(found[key], tensors[key]) for key in found), name
        assert safe_open(tmp_path / name, "pt").metadata() == metadata


@pytest.mark.filterwarnings("ignore")  # of its own
@pytest.mark.skipif("MUSUBI_TUNER" not in os.environ, reason="MUSUBI_TUNER names no checkout of kohya-ss/musubi-tuner")
@pytest.mark.parametrize(("family", "text"), [("qwen-image", "vl_embed"), ("wan", "t5"), ("z-image", "llm_embed")])
def test_musubi_tuner_s_own_code_reads_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, text: str
) -> None:
    """Its reader of batches, over the names that it makes of an image's name and size, gives the cache's values."""
    monkeypatch.setitem(sys.modules, "cv2", ModuleType("cv2"))  # for images, which are not read
    monkeypatch.syspath_prepend(str(Path(os.environ["MUSUBI_TUNER"], "src")))
    from musubi_tuner.dataset.bucket import BucketBatchManager

    cache = cache_of(family)
    musubi.export(cache, "foreign", tmp_path, dtype=torch.float32)
    items = []
    for stem in CAPTIONS:
        start = f"{tmp_path}/{stem}"
        latents, texts = f"{start}_0320x0160_{SHORT[family]}.safetensors", f"{start}_{SHORT[family]}_te.safetensors"
        items.append(SimpleNamespace(latent_cache_path=latents, text_encoder_output_cache_path=texts))
    [batch] = BucketBatchManager({(BUCKET.width, BUCKET.height): items}, batch_size=2)
    for number, sample_id in enumerate(f"{stem}.png" for stem in CAPTIONS):
        expected = cache.batch([sample_id], device="cpu", scaled=family != "z-image")
        assert torch.equal(batch["latents"][number].reshape(-1), expected["latents"].float().reshape(-1))
        assert torch.equal(batch[text][number], unpadded(expected, "prompt_embeds")[0])


def test_kontext_has_the_latents_of_its_control_image(tmp_path: Path) -> None:
    cache = cache_of("flux")
    report = musubi.export(cache, "foreign", tmp_path / "none")
    assert {each.reason for each in report.skipped} == {"unsupported-format"} and len(report.skipped) == 2
    assert "one control image (Kontext): this sample has 0" in report.skipped[0].detail
    assert not (tmp_path / "none").exists()
    manifest = cache.manifest("foreign")
    cat, dog = (manifest.rows[name] for name in ("cat.png", "dog.png"))
    (other,) = dog.images
    control = Ref(other.key, other.geometry, "unverified", "control 1", "0" * 64)
    missing = replace(control, key="f" * 64)
    rows = {"cat.png": replace(cat, parts=(control,)), "dog.png": replace(dog, parts=(missing,))}
    cache.manifests.write(replace(manifest, rows=rows))
    cache.refresh()
    report = musubi.export(cache, "foreign", tmp_path / "out")
    assert report.num_images == 1 and [(each.sample_id, each.reason) for each in report.skipped] == [
        ("dog.png", "missing")
    ]
    (path,) = (tmp_path / "out").glob("cat_*_fk.safetensors")
    found = load_file(path)
    torch.testing.assert_close(found["latents_1x8x16_float32"], latents_of("flux", 0))
    torch.testing.assert_close(found["latents_control_1x8x16_float32"], latents_of("flux", 1))


def test_a_text_without_its_caption_is_not_exported_as_the_empty_one(tmp_path: Path) -> None:
    """musubi-tuner would take it for what it trains with where a caption is dropped."""
    items = [
        ForeignImage("a.png", "f", None, latents_of("wan", 0), True, "mean", fit(Size(160, 320), BUCKET)),
        ForeignText(("a.png",), "f", None, torch.ones(5, 8), None),
    ]
    cache, _ = imported(Foreign(items, family="wan"))
    report = musubi.export(cache, "foreign", tmp_path)
    assert (report.num_images, report.num_texts, report.notes[musubi.NOTE_UNKNOWN]) == (1, 0, 1)
