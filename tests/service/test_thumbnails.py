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
from latentcache.service.thumbnails import Thumbnails, linear_pixels, scaled_latents, scaling_of
from latentcache.store import MemoryStore
from latentcache.types import Bucket, Entry, Record, Size


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    assert image.format == "WEBP"
    return image


def test_the_thumbnail_of_cached_latents_is_the_photo(tmp_path: Path) -> None:
    path = write_photo(tmp_path / "a.png", 1, (256, 384))
    pixels = decode(path.read_bytes(), str(path), ImagesConfig())
    geometry = fit(Size(256, 384), Bucket(256, 384))
    entry = image_entry("a.png", path, pixels, digest(path.read_bytes()), geometry)
    store = MemoryStore()
    store.add([entry])
    image = opened(Thumbnails(store).webp(entry.record.key))
    assert image.size == (48, 32)
    small = np.asarray(Image.fromarray(pixels).resize((48, 32), Image.Resampling.BOX), dtype=int)
    assert np.abs(np.asarray(image.convert("RGB"), dtype=int) - small).mean() < 8


def test_linear_pixels_are_the_family_s_map_and_clipped() -> None:
    assert linear_pixels(torch.zeros(4, 2, 3)).tolist() == [[list(sdxl.FAMILY.latent.preview[1])] * 3] * 2
    one = torch.zeros(4, 1, 1)
    one[0] = 1.0
    assert linear_pixels(one)[0, 0].tolist() == [210, 200, 190]
    assert linear_pixels(torch.full((4, 1, 1), torch.nan)).tolist() == [[[0, 0, 0]]]
    assert linear_pixels(one * 1e9)[0, 0].tolist() == [255, 255, 255]


def make(**identity: object) -> Record:
    value = {"kind": "image", **identity}
    return Record(key_of(value), "image", value, {})


def test_moments_and_latents_of_any_scaling_give_the_same_picture() -> None:
    latents = torch.randn(4, 3, 5)
    shifted = make(encoding={"scaling_factor": 0.5, "shift_factor": 0.25})
    plain = make(encoding={"scaling_factor": sdxl.SCALING_FACTOR, "shift_factor": None})
    imported, strange = make(imported={"format": "kohya"}), make(encoding={"scaling_factor": "1"})
    moments = torch.cat([latents / sdxl.SCALING_FACTOR, torch.zeros_like(latents)])
    for record, tensors in (
        (shifted, {"latents": latents / 0.5 + 0.25}),
        (plain, {"moments": moments}),
        (imported, {"latents": latents / sdxl.SCALING_FACTOR}),
        (strange, {"moments": moments}),
    ):
        torch.testing.assert_close(scaled_latents(Entry(record, tensors)), latents)


def test_a_decoder_takes_the_place_of_the_approximation() -> None:
    seen: list[tuple[int, ...]] = []

    def decoder(latents: torch.Tensor) -> np.ndarray:
        seen.append(tuple(latents.shape))
        return np.full((64, 128, 3), 200, np.uint8)

    record = make()
    store = MemoryStore()
    store.add([Entry(record, {"latents": torch.ones(4, 8, 16)})])
    thumbnails = Thumbnails(store, decoder)
    assert opened(thumbnails.webp(record.key, 100)).size == (100, 50)
    assert opened(thumbnails.webp(record.key, 1000)).size == (128, 64)
    assert seen == [(4, 8, 16)] * 2
    assert (thumbnails.name, Thumbnails(store).name) == ("vae", "linear")


def test_what_has_no_thumbnail_is_refused() -> None:
    text, wide = text_entry("a", "a caption", 4), Entry(make(wide=1), {"latents": torch.ones(16, 2, 2)})
    store = MemoryStore()
    store.add([text, wide])
    thumbnails = Thumbnails(store)
    with pytest.raises(EntryMissingError):
        thumbnails.webp("0" * 64)
    with pytest.raises(StoreError, match="not a key"):
        thumbnails.webp("../../etc/passwd")
    with pytest.raises(RequestRefused, match="of kind text"):
        thumbnails.webp(text.record.key)
    with pytest.raises(RequestRefused, match=r"\[4, h, w\]"):
        thumbnails.webp(wide.record.key)
    with pytest.raises(RequestRefused, match="no such side"):
        thumbnails.webp(wide.record.key, 10**9)


@pytest.mark.parametrize("factor", [10**400, float("nan"), float("inf"), 0, "x", None])
def test_a_scaling_factor_that_is_no_factor_is_the_family_s(factor: Any) -> None:
    assert (
        scaling_of({"encoding": {"scaling_factor": factor, "shift_factor": None}}).scaling_factor == sdxl.SCALING_FACTOR
    )
