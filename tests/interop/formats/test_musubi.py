"""musubi-tuner's files for every family that both have: what is read, what is written, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.foreign_files import damaged, items_quietly, reasons, split
from helpers.musubi_files import (
    SHORT,
    latents_key,
    latents_of,
    named,
    texts_of,
    write_cache,
    write_latents,
    write_text,
)
from helpers.photo_files import write_photo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from latentcache.dataset.manifest_row import PartRef
from latentcache.errors import ConfigError, DatasetError
from latentcache.families import family_named
from latentcache.interop.foreign_family import published_scaling
from latentcache.interop.formats import musubi
from latentcache.interop.image_match import NOTE_NO_IMAGE
from latentcache.interop.importing import import_cache
from latentcache.loading.cache import LatentCache
from latentcache.precache.workspace import Workspace
from latentcache.types import Size

EACH = pytest.mark.parametrize("family", sorted(SHORT))
CAPTIONS = {"cat": "a cat", "dog": "a dog, that sits"}
TRIMMED = sorted(set(SHORT) - {"flux"})


def cache_of(folder: Path, **options: Any) -> tuple[LatentCache, Any]:
    """The cache that an import gives, and its report."""
    workspace = Workspace()
    report = import_cache(musubi.read(folder, **options), workspace, name="foreign")
    return LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True), report


@EACH
def test_a_cache_is_imported_unscaled_with_the_rows_of_its_texts(tmp_path: Path, family: str) -> None:
    write_cache(tmp_path, family, CAPTIONS)
    cache, report = cache_of(tmp_path)
    assert not report.refused and (report.num_samples, report.num_unverified) == (2, 4)
    manifest = cache.manifest("foreign")
    assert manifest.common["family"] == family and manifest.imported_from == "musubi"
    assert cache.scaling(manifest) == published_scaling(family)
    recipe = {"family": family, "max_length": family_named(family).max_length, "keeps_padding": family == "flux"}
    assert manifest.common["text_encoding"] == recipe
    for seed, (name, row) in enumerate(sorted(manifest.rows.items())):
        stored = cache.get(row.images[0].key).tensors["latents"]
        expected = latents_of(family, seed)
        # What the denoiser gets is what the file holds, in the dtype of the training.
        denoiser_gets = stored if family == "z-image" else cache.scaling(manifest).apply(stored)
        assert torch.equal(denoiser_gets.bfloat16(), expected.bfloat16())
        assert stored.ndim == (4 if family_named(family).latent.is_video else 3)
        entry = cache.get(row.captions[0].key)
        assert row.captions[0].text == CAPTIONS[name]
        fields = musubi.ARCHITECTURES[SHORT[family]].texts
        wanted = {fields[key]: tensor for key, tensor in texts_of(family, seed).items()}
        assert entry.tensors.keys() == wanted.keys()
        assert all(torch.equal(tensor, wanted[field]) for field, tensor in entry.tensors.items())
        assert entry.ragged == (frozenset() if family == "flux" else {"prompt_embeds"})
        assert row.images[0].geometry.original_size == Size(160, 320)


@pytest.mark.parametrize("family", TRIMMED)
def test_what_is_exported_and_imported_again_is_the_same(tmp_path: Path, family: str) -> None:
    """The files are equal to the last bit, and those of Z-Image, which are not scaled, give the same entries."""
    write_cache(tmp_path / "made", family, CAPTIONS)
    cache, _ = cache_of(tmp_path / "made")
    report = musubi.export(cache, "foreign", tmp_path / "again", dtype=latents_of(family, 0).dtype)
    assert (report.num_images, report.num_texts, report.skipped) == (2, 2, [])
    names = sorted(path.name for path in (tmp_path / "made").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in names:
        left, right = (load_file(tmp_path / folder / name) for folder in ("made", "again"))
        assert left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left), name
    again, _ = cache_of(tmp_path / "again")
    keys = [set(each.manifest("foreign").keys()) for each in (cache, again)]
    assert keys[0] == keys[1]


def test_an_export_of_kontext_needs_control_images(tmp_path: Path) -> None:
    write_cache(tmp_path / "made", "flux", CAPTIONS)
    cache, _ = cache_of(tmp_path / "made")
    report = musubi.export(cache, "foreign", tmp_path / "again")
    assert reasons(report.skipped) == ["unsupported-format"] * 2 and "control image" in report.skipped[0].detail
    assert not (tmp_path / "again").exists()


def test_an_export_of_kontext_has_the_latents_of_the_control_image(tmp_path: Path) -> None:
    write_cache(tmp_path / "made", "flux", CAPTIONS)
    workspace = Workspace()
    import_cache(musubi.read(tmp_path / "made"), workspace, name="foreign")
    manifest = workspace.manifests.read("foreign")
    assert manifest is not None
    cat, dog = (manifest.rows[name] for name in ("cat", "dog"))
    (other,) = dog.images
    control = PartRef("control", other.key, other.geometry, "0" * 64, "unverified")
    missing = replace(control, key="f" * 64)
    rows = {"cat": replace(cat, parts=(control,)), "dog": replace(dog, parts=(missing,))}
    workspace.manifests.write(replace(manifest, rows=rows))
    cache = LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True)
    report = musubi.export(cache, "foreign", tmp_path / "again")
    assert report.num_images == 1 and [(each.sample_id, each.reason) for each in report.skipped] == [("dog", "missing")]
    (path,) = (tmp_path / "again").glob("cat_*_fk.safetensors")
    found = load_file(path)
    torch.testing.assert_close(found["latents_1x8x16_float32"], latents_of("flux", 0))
    torch.testing.assert_close(found["latents_control_1x8x16_float32"], latents_of("flux", 1))


def test_images_give_their_names_and_digests(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    write_photo(photos / "cat.png", 0, (160, 320))
    (photos / "cat.txt").write_text("a  cat\n")
    write_cache(tmp_path / "cache", "z-image", CAPTIONS)
    images, texts, refused = split(musubi.read(tmp_path / "cache", images=photos))
    assert not refused and [image.sample_id for image in images] == ["cat.png", "dog"]
    assert images[0].image_path == photos / "cat.png" and NOTE_NO_IMAGE in (images[1].note or "")
    assert [text.caption for text in texts] == ["a  cat", CAPTIONS["dog"]]  # the sample's own words


def test_an_edited_caption_and_a_replaced_image_are_refused(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    write_photo(photos / "cat.png", 0, (80, 80))
    (photos / "cat.txt").write_text("another cat")
    write_cache(tmp_path / "cache", "z-image", {"cat": "a cat"})
    images, texts, refused = split(musubi.read(tmp_path / "cache", images=photos))
    assert not images and not texts and reasons(refused) == ["changed", "changed"]
    assert "was replaced" in refused[0].detail and "edited since" in refused[1].detail


def test_control_images_are_named_and_clips_refused(tmp_path: Path) -> None:
    control = {"latents_control_1x8x16_float32": latents_of("flux", 7)}
    write_latents(tmp_path / "kontext", "flux", "cat", (320, 160), latents_of("flux", 0), **control)
    (image,), _, refused = split(musubi.read(tmp_path / "kontext"))
    assert (
        not refused
        and musubi.NOTE_CONTROL in (image.note or "")
        and (image.is_scaled, image.output) == (True, "sample")
    )
    if "wan" in SHORT:
        write_latents(tmp_path / "clips", "wan", "dog_00000-081", (320, 160), latents_of("wan", 0))
        frames = torch.randn(16, 5, 8, 16).bfloat16()
        write_latents(tmp_path / "clips", "wan", "cat", (320, 160), frames)
        *_, refused = split(musubi.read(tmp_path / "clips"))
        assert reasons(refused) == ["unsupported-format"] * 2 and "5 latent frames" in refused[0].detail


def test_files_of_two_families_need_to_be_told_apart(tmp_path: Path) -> None:
    for family in ("flux", "z-image"):
        write_cache(tmp_path, family, CAPTIONS)
    with pytest.raises(ConfigError, match="of flux, z-image, and a manifest holds one family: give --family"):
        musubi.read(tmp_path)
    images, texts, refused = split(musubi.read(tmp_path, family="z-image"))
    assert (len(images), len(texts)) == (2, 2)
    assert reasons(refused) == ["unsupported-format"] * 4 and "of the architecture fk" in refused[0].detail
    with pytest.raises(ConfigError, match="files of the family sdxl is not known; it is for flux"):
        musubi.read(tmp_path, family="sdxl")
    with pytest.raises(DatasetError, match="is not a folder"):
        musubi.read(tmp_path / "none")


GOOD = latents_of("z-image", 0)


@pytest.mark.parametrize(
    ("latents", "more", "reason", "detail"),
    [
        (GOOD, {"latents_image_1x8x16_float32": GOOD}, "unsupported-format", "holds latents_image_1x8x16_float32"),
        (GOOD, {"clip_float32": GOOD}, "unsupported-format", "no plain image's latent"),
        (GOOD, {"latents_1x8x8_float32": GOOD}, "corrupt", "2 latents"),
        (GOOD[None], {}, "corrupt", "16, 8, 16"),
        (GOOD.to(torch.float64), {}, "corrupt", "0 latents"),
    ],
    ids=["image-to-video", "clip", "two", "shape", "dtype"],
)
def test_odd_latents_are_refused(
    tmp_path: Path, latents: torch.Tensor, more: dict[str, torch.Tensor], reason: str, detail: str
) -> None:
    write_latents(tmp_path, "z-image", "cat", (320, 160), latents, **more)
    images, _, (refusal,) = split(musubi.read(tmp_path))
    assert not images and refusal.reason == reason and detail in refusal.detail


def test_names_that_deny_what_is_in_a_file_are_refused(tmp_path: Path) -> None:
    path = write_latents(tmp_path, "z-image", "cat", (320, 160), GOOD)
    path.rename(tmp_path / "cat_0160x0160_zi.safetensors")
    path = write_text(tmp_path, "z-image", "cat", "a cat", texts_of("z-image", 0))
    path.rename(tmp_path / "cat_fk_te.safetensors")
    *_, refused = split(musubi.read(tmp_path, family="flux"))
    assert reasons(refused) == ["unsupported-format", "corrupt"] and "'z_image'" in refused[1].detail
    (_, refusal) = split(musubi.read(tmp_path, family="z-image"))[2]
    assert "its metadata another one" in split(musubi.read(tmp_path, family="z-image"))[2][0].detail
    assert refusal.reason == "unsupported-format"


def test_texts_of_another_form_are_refused(tmp_path: Path) -> None:
    write_text(tmp_path, "z-image", "a", "a cat", {"varlen_vl_embed": torch.ones(3, 8)})
    write_text(tmp_path, "z-image", "b", "a cat", {"varlen_llm_embed": torch.ones(8)})
    write_text(tmp_path, "z-image", "c", "a cat", {"varlen_llm_embed": torch.ones(3, 8).to(torch.float8_e4m3fn)})
    *_, refused = split(musubi.read(tmp_path))
    assert reasons(refused) == ["corrupt"] * 3
    assert "needed are varlen_llm_embed" in refused[0].detail and "2 or 3 dimensions" in refused[1].detail


def test_latents_that_are_scaled_otherwise_are_refused(tmp_path: Path) -> None:
    """Z-Image's are unscaled there: what deviates by 1 was scaled already."""
    write_latents(tmp_path, "z-image", "cat", (320, 160), torch.randn(16, 8, 16))
    with pytest.raises(DatasetError, match=r"this format holds unscaled z-image latents, which have about 2\.77"):
        cache_of(tmp_path)


@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files_are_refused_or_read_whole(tmp_path: Path, data: st.DataObject) -> None:
    path = write_latents(tmp_path, "z-image", "cat", (320, 160), GOOD)
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    for item in items_quietly(musubi.read(tmp_path)):
        assert item.path == str(path)


def test_the_helper_names_what_it_writes() -> None:
    assert set(named({latents_key(GOOD): GOOD})) == {"latents_1x8x16_float32"}
