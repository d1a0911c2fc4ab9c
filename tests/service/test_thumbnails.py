"""Thumbnails: the linear approximation, the decoder's hook, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.page_caches import image_entry, text_entry
from helpers.photo_files import write_photo
from helpers.tiny_models import tiny_model
from PIL import Image

from latentcache.config import ImagesConfig
from latentcache.dataset.buckets import fit
from latentcache.dataset.images import decode
from latentcache.errors import EntryMissingError, RequestRefused, StoreError
from latentcache.families import FAMILIES, family_named, sdxl
from latentcache.identity import digest, key_of
from latentcache.models.vae import encode_images, vae_facts
from latentcache.service.page.thumbnails import Thumbnails, channel_pixels, first_frame, linear_pixels, webp_of
from latentcache.store import MemoryStore
from latentcache.types import Bucket, Entry, Record, Size

assert sdxl.FAMILY.latent.preview is not None
PREVIEW = sdxl.FAMILY.latent.preview


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    assert image.format == "WEBP"
    return image


def test_the_thumbnail_of_cached_latents_is_the_photo(tmp_path: Path) -> None:
    path = write_photo(tmp_path / "a.png", 1, (256, 384))
    pixels = decode(path.read_bytes(), str(path), ImagesConfig(min_side=16))
    geometry = fit(Size(256, 384), Bucket(256, 384))
    entry = image_entry("a.png", path, pixels, digest(path.read_bytes()), geometry)
    store = MemoryStore()
    store.add([entry])
    image = opened(Thumbnails(store).webp(entry.record.key)[0])
    assert image.size == (48, 32)
    small = np.asarray(Image.fromarray(pixels).resize((48, 32), Image.Resampling.BOX), dtype=int)
    assert np.abs(np.asarray(image.convert("RGB"), dtype=int) - small).mean() < 8


def make(**identity: object) -> Record:
    value = {"kind": "image", **identity}
    return Record(key_of(value), "image", value, {})


def stored(record: Record, **tensors: torch.Tensor) -> Thumbnails:
    store = MemoryStore()
    store.add([Entry(record, tensors)])
    return Thumbnails(store)


def test_moments_latents_and_imported_entries_give_the_same_picture() -> None:
    latents = torch.randn(4, 3, 5)
    expected = linear_pixels(latents * PREVIEW.scaling_factor, PREVIEW)
    plain = make(encoding={"scaling_factor": PREVIEW.scaling_factor, "shift_factor": None})
    moments = torch.cat([latents, torch.zeros_like(latents)])
    for record, tensors in (
        (plain, {"latents": latents}),
        (plain, {"moments": moments}),
        (make(imported={"format": "kohya"}), {"latents": latents}),
    ):
        assert torch.equal(first_frame(Entry(record, tensors)), latents)
        assert stored(record, **tensors).webp(record.key, 64) == (webp_of(expected, 64), "linear")


@pytest.mark.parametrize("factor", [0.5, 10**400, float("nan"), float("inf"), 0, "x", [1]])
def test_colours_are_not_guessed_for_the_latents_of_another_vae(factor: Any) -> None:
    """SD 1.5 has as many channels as SDXL, and another factor: SDXL's map would give wrong colours."""
    record = Record("0" * 64, "image", {"encoding": {"scaling_factor": factor}}, {})
    fields = {"latents": ("float32", (4, 3, 5))}
    assert Thumbnails(MemoryStore()).way(record.identity, fields) == "channels"
    assert Thumbnails(MemoryStore()).way({"encoding": {"scaling_factor": PREVIEW.scaling_factor}}, fields) == "linear"


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_s_images_have_a_thumbnail(name: str) -> None:
    """The tiny model's encoding of two halves, dark and bright: they differ in the picture, whatever its colours."""
    family = family_named(name)
    vae = tiny_model(family.name)[family.names("vae")[0]]
    pixels = np.zeros((1, 64, 128, 3), np.uint8)
    pixels[:, :, 64:] = 255
    facts = vae_facts(vae)
    moments = encode_images(vae, pixels, family)[0].contiguous()
    factor = facts.scaling.scaling_factor
    record = make(encoding={"scaling_factor": factor, "shift_factor": facts.scaling.shift_factor}, family=name)
    thumbnails = stored(record, moments=moments)
    data, way = thumbnails.webp(record.key)
    assert way == thumbnails.way(record.identity, thumbnails.store.describe(record.key))
    assert way == ("linear" if family.latent.preview else "channels")
    image = opened(data)
    assert image.size == (128 // family.latent.downscale, 64 // family.latent.downscale)
    shown = np.asarray(image.convert("RGB"), dtype=int)
    half = shown.shape[1] // 2
    contrast = np.abs(shown[:, :half].mean((0, 1)) - shown[:, half:].mean((0, 1))).max()
    assert contrast > (10 if way == "channels" else 1)  # a linear map does not stretch it, and these VAEs know nothing


def test_of_a_video_the_first_frame_is_shown() -> None:
    frames = torch.randn(16, 3, 4, 6)
    video, still = make(), make(still=1)
    expected = webp_of(channel_pixels(frames[:, 0]), 64), "channels"
    assert stored(video, latents=frames).webp(video.key, 64) == expected
    assert stored(still, latents=frames[:, :1].clone()).webp(still.key, 64) == expected


def test_the_channels_that_differ_are_shown_whatever_their_scale() -> None:
    latents = torch.randn(16, 8, 8, generator=torch.Generator().manual_seed(1)) * 0.1
    latents[3, :, 4:] += 2.0
    pixels = channel_pixels(latents).astype(int)
    assert abs(pixels[:, :4, 0].mean() - pixels[:, 4:, 0].mean()) > 80
    assert np.abs(channel_pixels(latents * 7.5 - 3.0).astype(int) - pixels).max() <= 1
    assert channel_pixels(torch.ones(16, 2, 2)).tolist() == [[[128] * 3] * 2] * 2


def test_what_has_no_thumbnail_is_refused() -> None:
    text, flat = text_entry("a", "a caption", 4), Entry(make(wide=1), {"latents": torch.ones(16, 2)})
    store = MemoryStore()
    store.add([text, flat])
    thumbnails = Thumbnails(store)
    with pytest.raises(EntryMissingError):
        thumbnails.webp("0" * 64)
    with pytest.raises(StoreError, match="not a key"):
        thumbnails.webp("../../etc/passwd")
    with pytest.raises(RequestRefused, match="of kind text"):
        thumbnails.webp(text.record.key)
    with pytest.raises(RequestRefused, match=r"\[C, h, w\]"):
        thumbnails.webp(flat.record.key)
