"""The files of musubi-tuner, for every family that both support: equal to the specification, and what is left out."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.foreign_samples import BUCKET, Foreign, imported, of_family
from safetensors import safe_open
from safetensors.torch import load_file

from latentcache import unpadded
from latentcache.dataset.row_table import Ref
from latentcache.families import FAMILIES
from latentcache.interop.formats import musubi
from latentcache.interop.readers import layouts_of
from latentcache.loading.cache import LatentCache

STEMS = ("cat", "dog")
LAYOUTS = {family: layout for family, layout in layouts_of("musubi").items() if family in FAMILIES}
WITH_FRAMES = ("qwen-image", "krea2", "wan")


def cache_of(family: str, folder: str = "") -> tuple[LatentCache, list[Any]]:
    """A cache with a sample for each stem, and the items, a latent and a text for each, that it was imported from."""
    items = of_family(family, *(f"{folder}{stem}.png" for stem in STEMS))
    cache, report = imported(Foreign(items, family=family))
    assert not report.refused and report.num_samples == 2
    return cache, items


@pytest.mark.parametrize("family", sorted(set(LAYOUTS) - {"flux", "wan-i2v"}))
def test_the_files_are_as_the_specification_has_them(tmp_path: Path, family: str) -> None:
    """Bit for bit, with the names and the metadata that musubi-tuner requires."""
    cache, items = cache_of(family, "sub/")
    layout, is_scaled = LAYOUTS[family], family != "z-image"
    of_all = {"architecture": layout.title, "format_version": "1.0.1"}
    dtype = torch.bfloat16 if is_scaled else torch.float32
    expected = {}
    for stem, image, text in zip(STEMS, items[::2], items[1::2], strict=True):
        latents = image.latents.bfloat16() if is_scaled else cache.batch([image.sample_id], device="cpu")["latents"][0]
        assert latents.shape == ((16, 1, 8, 16) if family in WITH_FRAMES else (16, 8, 16)) and latents.dtype is dtype
        name = f"latents_1x8x16_{str(dtype).removeprefix('torch.')}"
        size = {"width": "160", "height": "80"}
        expected[f"{stem}_0160x0080_{layout.architecture}.safetensors"] = {name: latents}, of_all | size
        named = {f"{name}_bfloat16": getattr(text, field) for name, field in layout.texts.items()}
        expected[f"{stem}_{layout.architecture}_te.safetensors"] = named, of_all | {"caption1": text.caption}
    report = musubi.export(cache, "foreign", tmp_path, dtype=dtype)
    assert (report.num_images, report.num_texts, report.num_files, report.skipped) == (2, 2, 4, [])
    assert {path.name for path in tmp_path.iterdir()} == expected.keys()
    for name, (tensors, metadata) in expected.items():
        found = load_file(tmp_path / name)
        assert found.keys() == tensors.keys() and all(torch.equal(found[key], tensors[key]) for key in found), name
        assert safe_open(tmp_path / name, "pt").metadata() == metadata


@pytest.mark.filterwarnings("ignore")  # of its own
@pytest.mark.skipif("MUSUBI_TUNER" not in os.environ, reason="MUSUBI_TUNER is not set to a checkout of musubi-tuner")
@pytest.mark.parametrize(("family", "text"), [("qwen-image", "vl_embed"), ("wan", "t5"), ("z-image", "llm_embed")])
def test_its_own_code_reads_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, text: str) -> None:
    """Its batch reader finds the files by the image's name and size, and reads the cache's values."""
    monkeypatch.setitem(sys.modules, "cv2", ModuleType("cv2"))  # only for reading images
    monkeypatch.syspath_prepend(str(Path(os.environ["MUSUBI_TUNER"], "src")))
    from musubi_tuner.dataset.bucket import BucketBatchManager

    cache, _ = cache_of(family)
    musubi.export(cache, "foreign", tmp_path, dtype=torch.float32)
    items, short = [], LAYOUTS[family].architecture
    for start in (f"{tmp_path}/{stem}" for stem in STEMS):
        latents, texts = f"{start}_0160x0080_{short}.safetensors", f"{start}_{short}_te.safetensors"
        items.append(SimpleNamespace(latent_cache_path=latents, text_encoder_output_cache_path=texts))
    [batch] = BucketBatchManager({(BUCKET.width, BUCKET.height): items}, batch_size=2)
    for number, stem in enumerate(STEMS):
        expected = cache.batch([f"{stem}.png"], device="cpu", scaled=family != "z-image")
        assert torch.equal(batch["latents"][number].reshape(-1), expected["latents"].float().reshape(-1))
        assert torch.equal(batch[text][number], unpadded(expected, "prompt_embeds")[0])


def test_kontext_has_the_latents_of_its_control_image(tmp_path: Path) -> None:
    cache, items = cache_of("flux")
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
    skipped = [(each.sample_id, each.reason) for each in report.skipped]
    assert report.num_images == 1 and skipped == [("dog.png", "missing")]
    (path,) = (tmp_path / "out").glob("cat_*_fk.safetensors")
    found = load_file(path)
    torch.testing.assert_close(found["latents_1x8x16_float32"], items[0].latents.float())
    torch.testing.assert_close(found["latents_control_1x8x16_float32"], items[2].latents.float())


def test_a_text_without_its_caption_is_not_exported_as_the_empty_one(tmp_path: Path) -> None:
    """For musubi-tuner that would be the text for caption dropout."""
    image, text = of_family("wan", "a.png")
    cache, _ = imported(Foreign([image, replace(text, caption=None)], family="wan"))
    report = musubi.export(cache, "foreign", tmp_path)
    assert (report.num_images, report.num_texts, report.notes[musubi.NOTE_UNKNOWN]) == (1, 0, 1)
