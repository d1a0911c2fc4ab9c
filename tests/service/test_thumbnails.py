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
from PIL import Image

from latentcache.config import ImagesConfig
from latentcache.dataset.buckets import fit
from latentcache.dataset.images import decode
from latentcache.errors import EntryMissingError, RequestRefused, StoreError
from latentcache.families import sdxl
from latentcache.identity import digest, key_of
from latentcache.service.page.thumbnails import Thumbnails, first_frame, linear_pixels, webp_of
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


@pytest.mark.parametrize("factor", [0.5, float("nan"), "x"])
def test_colours_are_not_guessed_for_the_latents_of_another_vae(factor: Any) -> None:
    """SD 1.5 has as many channels as SDXL, and another factor: SDXL's map would give wrong colours."""
    record = Record("0" * 64, "image", {"encoding": {"scaling_factor": factor}}, {})
    fields = {"latents": ("float32", (4, 3, 5))}
    assert Thumbnails(MemoryStore()).way(record.identity, fields) == "channels"
    assert Thumbnails(MemoryStore()).way({"encoding": {"scaling_factor": PREVIEW.scaling_factor}}, fields) == "linear"


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
