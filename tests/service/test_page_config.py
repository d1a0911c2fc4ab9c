"""The pictures of the page, and what it knows with a config: why a sample is a miss, and where captions are cut."""

from __future__ import annotations

import io
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.photo_files import write_photo
from helpers.remote_samples import entries_of, make_entry
from helpers.serving import RunningServer, serving_here
from helpers.tiny_models import tiny_encoders, tiny_model
from PIL import Image

from latentcache.errors import EntryMissingError, RequestRefused, StoreError
from latentcache.families import family_named, sdxl
from latentcache.identity import key_of
from latentcache.models.model_loader import LoadedModels
from latentcache.models.vae import vae_facts
from latentcache.precache.run import run_precache
from latentcache.service.page.text import url
from latentcache.service.page.thumbnails import Thumbnails
from latentcache.service.page.vae_decoder import VaeDecoder
from latentcache.store import MemoryStore
from latentcache.types import Entry, Record

assert sdxl.FAMILY.latent.preview is not None
PREVIEW = sdxl.FAMILY.latent.preview
LONG = "a red house " * 40


def sample_page(server: RunningServer, name: str, **more: Any) -> str:
    return server.get(url("/sample", dataset="photos", id=name, **more)).body.decode()


def test_reasons_and_cut_captions(make_config: Any, photos: Path) -> None:
    (photos / "b.txt").write_text(LONG, encoding="utf-8")
    config = make_config()
    run_precache(config)
    (photos / "c.txt").write_text("another caption\n", encoding="utf-8")
    with serving_here(config.cache.path, writes=False, config=config) as server:
        waiting = sample_page(server, "c.png")
        asks = url("/sample", dataset="photos", id="c.png", reasons=1)
        assert "caption changed" not in waiting and f'hx-get="{escape(asks)}"' in waiting
        page = sample_page(server, "c.png", reasons=1)
        assert "caption changed" in page and "Asking the planner" not in page and page.count(">hit<") == 1
        page = sample_page(server, "b.png", reasons=1)
        assert ">hit</span> 2 entries are cached as the config asks." in page
        cut = page.partition('<s class="cut">')[2].partition("</s>")[0]
        # 77 tokens, of which two are begin and end: 25 times "a red house", one token a word or more.
        assert cut and LONG.strip().endswith(cut) and len(cut) < len(LONG) - 75
        assert "decoded by the VAE" in sample_page(server, "b.png")
    with serving_here(config.cache.path, writes=False, config=make_config(**{"encode.clip_skip": 1})) as server:
        assert "clip skip changed (0 -&gt; 1)" in sample_page(server, "a.png", reasons=1)


@pytest.mark.parametrize("name", ["sdxl", "flux2", "qwen-image", "qwen-image-21", "wan"])  # one for each rule
def test_the_vae_of_each_family_decodes_its_latents_alone(name: str, make_config: Any) -> None:
    """An odd number of rows is what halving a picture may leave; joined in pairs, the last one has no partner."""
    family, vae = family_named(name), tiny_model(name)["vae"]
    decoder = VaeDecoder(make_config(), LoadedModels(family=family, **tiny_encoders(name)))
    assert decoder.downscale == family.latent.downscale
    latents = torch.randn(family.latent.channels, 9, 8, generator=torch.Generator().manual_seed(0))
    pixels, scaling = decoder(latents), vae_facts(vae, family).scaling
    rows = 8 if scaling.rule == "batch_norm" else 9
    frame = latents[None, :, None] if family.latent.is_video else latents[None, :, :rows]
    with torch.no_grad():
        whole = vae.decode(frame, return_dict=False)[0][0]
    decoded = whole[:, 0] if family.latent.is_video else whole
    expected = ((decoded / 2 + 0.5).clamp(0, 1) * 255).round().byte().movedim(0, -1).numpy().astype(int)
    # Scaling and its inverse round, and a random VAE may take a shade from one to the next.
    side, channels = family.latent.downscale, 4 if name.startswith("qwen-image-21") else 3
    assert pixels.shape == expected.shape == (rows * side, 8 * side, channels)
    assert np.abs(pixels.astype(int) - expected).max() <= 1 and pixels.std() > 1
    # FLUX.1, Z-Image, Qwen-Image and Wan all have 16 channels, and only the first two have one VAE.
    shape = tuple(frame.shape[1:])
    own: dict[str, Any] = {"scaling_factor": scaling.scaling_factor, "shift_factor": scaling.shift_factor}
    own["vae"] = {"class_name": type(vae).__name__}
    assert decoder.takes({"encoding": own}, shape) and decoder.takes({"imported": {"format": "musubi"}}, shape)
    for other in ({"scaling_factor": 1.5305}, {"vae": {"class_name": "AutoencoderOther"}}, {"vae": "?"}):
        assert not decoder.takes({"encoding": own | other}, shape), other
    assert not decoder.takes({"encoding": own}, (3, *shape[1:]))


def thumbnails_of(*entries: Entry) -> Thumbnails:
    store = MemoryStore()
    store.add(entries)
    return Thumbnails(store)


def test_latents_moments_and_imported_entries_give_the_photo_and_another_vae_no_colours(tmp_path: Path) -> None:
    """SD 1.5 has as many channels as SDXL, and another factor: SDXL's map would give wrong colours."""
    photo = Image.open(write_photo(tmp_path / "a.png", 1, (256, 384))).convert("RGB")
    small = np.asarray(photo.resize((48, 32), Image.Resampling.BOX), dtype=np.float32)
    weights, biases = (torch.tensor(values, dtype=torch.float32) for values in (PREVIEW.weights, PREVIEW.biases))
    scaled = torch.einsum("hwr,cr->chw", torch.from_numpy(small) - biases, torch.linalg.pinv(weights))
    latents, identity = scaled / PREVIEW.scaling_factor, {"kind": "image", "imported": {"format": "kohya"}}
    for entry in (
        make_entry("image", 1, {"latents": latents}),
        make_entry("image", 2, {"moments": torch.cat([latents, torch.full_like(latents, -8.0)]).half()}),
        Entry(Record(key_of(identity), "image", identity, {}), {"latents": latents}),
    ):
        data, way = thumbnails_of(entry).webp(entry.record.key)
        image = Image.open(io.BytesIO(data))
        assert (image.format, image.size, way) == ("WEBP", (48, 32), "linear")
        assert np.abs(np.asarray(image.convert("RGB"), dtype=np.float32) - small).mean() < 8
    fields = {"latents": ("float32", (4, 3, 5))}
    for factor, way in ((0.5, "channels"), ("x", "channels"), (PREVIEW.scaling_factor, "linear")):
        assert thumbnails_of().way({"encoding": {"scaling_factor": factor}}, fields) == way


def test_what_has_no_thumbnail_is_refused() -> None:
    text, flat = entries_of(1)[1], make_entry("image", 1, {"latents": torch.ones(16, 2)})
    thumbnails = thumbnails_of(text, flat)
    for key, error, what in (
        ("0" * 64, EntryMissingError, "0{64}"),
        ("../../etc/passwd", StoreError, "not a key"),
        (text.record.key, RequestRefused, "of kind text"),
        (flat.record.key, RequestRefused, r"\[C, h, w\]"),
    ):
        with pytest.raises(error, match=what):
            thumbnails.webp(key)
