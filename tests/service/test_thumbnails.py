"""Thumbnails: the linear approximation, the decoder's hook, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.page_server import text_entry
from helpers.photo_files import write_photo
from helpers.remote_samples import make_entry
from PIL import Image

from latentcache.errors import EntryMissingError, RequestRefused, StoreError
from latentcache.families import sdxl
from latentcache.identity import key_of
from latentcache.service.page.thumbnails import Thumbnails, first_frame, linear_pixels, webp_of
from latentcache.store import MemoryStore
from latentcache.types import Entry, Record

assert sdxl.FAMILY.latent.preview is not None
PREVIEW = sdxl.FAMILY.latent.preview


def thumbnails_of(*entries: Entry) -> Thumbnails:
    store = MemoryStore()
    store.add(entries)
    return Thumbnails(store)


def test_the_thumbnail_of_cached_latents_is_the_photo(tmp_path: Path) -> None:
    photo = Image.open(write_photo(tmp_path / "a.png", 1, (256, 384))).convert("RGB")
    small = np.asarray(photo.resize((48, 32), Image.Resampling.BOX), dtype=np.float32)
    weights, biases = (torch.tensor(values, dtype=torch.float32) for values in (PREVIEW.weights, PREVIEW.biases))
    latents = torch.einsum("hwr,cr->chw", torch.from_numpy(small) - biases, torch.linalg.pinv(weights))
    moments = torch.cat([latents / PREVIEW.scaling_factor, torch.full_like(latents, -8.0)]).half()
    entry = make_entry("image", 1, {"moments": moments})
    image = Image.open(io.BytesIO(thumbnails_of(entry).webp(entry.record.key)[0]))
    assert (image.format, image.size) == ("WEBP", (48, 32))
    assert np.abs(np.asarray(image.convert("RGB"), dtype=np.float32) - small).mean() < 8


def test_moments_latents_and_imported_entries_give_the_same_picture() -> None:
    latents = torch.randn(4, 3, 5)
    expected = webp_of(linear_pixels(latents * PREVIEW.scaling_factor, PREVIEW), 64)
    identity = {"kind": "image", "imported": {"format": "kohya"}}
    for entry in (
        make_entry("image", 1, {"latents": latents}),
        make_entry("image", 2, {"moments": torch.cat([latents, torch.zeros_like(latents)])}),
        Entry(Record(key_of(identity), "image", identity, {}), {"latents": latents}),
    ):
        assert torch.equal(first_frame(entry), latents)
        assert thumbnails_of(entry).webp(entry.record.key, 64) == (expected, "linear")


@pytest.mark.parametrize("factor", [0.5, float("nan"), "x"])
def test_colours_are_not_guessed_for_the_latents_of_another_vae(factor: Any) -> None:
    """SD 1.5 has as many channels as SDXL, and another factor: SDXL's map would give wrong colours."""
    fields = {"latents": ("float32", (4, 3, 5))}
    assert thumbnails_of().way({"encoding": {"scaling_factor": factor}}, fields) == "channels"
    assert thumbnails_of().way({"encoding": {"scaling_factor": PREVIEW.scaling_factor}}, fields) == "linear"


def test_what_has_no_thumbnail_is_refused() -> None:
    text, flat = text_entry("a", "a caption", 4), make_entry("image", 1, {"latents": torch.ones(16, 2)})
    thumbnails = thumbnails_of(text, flat)
    for key, error, what in (
        ("0" * 64, EntryMissingError, "0{64}"),
        ("../../etc/passwd", StoreError, "not a key"),
        (text.record.key, RequestRefused, "of kind text"),
        (flat.record.key, RequestRefused, r"\[C, h, w\]"),
    ):
        with pytest.raises(error, match=what):
            thumbnails.webp(key)
