"""What the page knows with a config: why a sample is a hit or a miss, where captions are cut, the VAE's pictures."""

from __future__ import annotations

import io
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.serving import RunningServer, serving_here
from helpers.tiny_models import tiny_encoders, tiny_model
from PIL import Image

from latentcache.config import Config
from latentcache.families import family_named
from latentcache.models.model_loader import LoadedModels, ModelLoader
from latentcache.models.vae import decode_latents, vae_facts
from latentcache.precache.run import run_precache
from latentcache.service.page.text import url
from latentcache.service.page.thumbnails import first_frame, webp_of
from latentcache.service.page.vae_decoder import VaeDecoder
from latentcache.store import DiskStore

LONG = "a red house " * 40


def sample_page(server: RunningServer, name: str, **more: Any) -> str:
    return server.get(url("/sample", dataset="photos", id=name, **more)).body.decode()


def test_reasons_cut_captions_and_the_vae_s_pictures(make_config: Callable[..., Config], photos: Path) -> None:
    (photos / "b.txt").write_text(LONG, encoding="utf-8")
    config = make_config()
    run_precache(config)
    assert isinstance(config.cache.path, Path)
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
        with DiskStore(config.cache.path, create=False) as store:
            entry = next(entry for key in store.keys() if (entry := store.get(key)).record.kind == "image")
        latents = vae_facts(vae := ModelLoader("tiny").vae(torch.float32)).scaling.apply(first_frame(entry)[None])
        thumbnail = server.get(f"/v1/thumbnails/{entry.record.key}.webp").body
        shown, expected = (
            np.asarray(Image.open(io.BytesIO(data)))
            for data in (thumbnail, webp_of(decode_latents(vae, latents)[0], 256))
        )
        assert np.array_equal(shown, expected) and shown.shape[0] == 8 * latents.shape[2]
    with serving_here(config.cache.path, writes=False, config=make_config(**{"encode.clip_skip": 1})) as server:
        assert "clip skip changed (0 -&gt; 1)" in sample_page(server, "a.png", reasons=1)


@pytest.mark.parametrize("name", ["sdxl", "flux2", "qwen-image", "qwen-image-21", "wan"])  # one for each rule
def test_the_vae_of_each_family_decodes_its_latents(name: str, make_config: Callable[..., Config]) -> None:
    """An odd number of rows is what halving a picture may leave; joined in pairs, the last one has no partner."""
    family = family_named(name)
    decoder = VaeDecoder(make_config(), LoadedModels(family=family, **tiny_encoders(name)))
    assert decoder.downscale == family.latent.downscale
    latents = torch.randn(family.latent.channels, 9, 8, generator=torch.Generator().manual_seed(0))
    pixels = decoder(latents)
    rows = 8 if vae_facts(vae := tiny_model(family.name)["vae"], family).scaling.rule == "batch_norm" else 9
    frame = latents[None, :, None] if family.latent.is_video else latents[None, :, :rows]
    with torch.no_grad():
        whole = vae.decode(frame, return_dict=False)[0][0]
    decoded = whole[:, 0] if family.latent.is_video else whole
    expected = ((decoded / 2 + 0.5).clamp(0, 1) * 255).round().byte().movedim(0, -1).numpy().astype(int)
    # Scaling and its inverse round, and a random VAE may take a shade from one to the next.
    side, channels = family.latent.downscale, 4 if name.startswith("qwen-image-21") else 3
    assert pixels.shape == expected.shape == (rows * side, 8 * side, channels)
    assert np.abs(pixels.astype(int) - expected).max() <= 1 and pixels.std() > 1


def test_a_vae_decodes_the_latents_of_its_own_class_and_factors(make_config: Callable[..., Config]) -> None:
    """FLUX.1, Z-Image, Qwen-Image and Wan all have 16 channels, and only the first two have one VAE."""
    decoders = {
        name: VaeDecoder(make_config(), LoadedModels(family=family_named(name), **tiny_encoders(name)))
        for name in ("flux", "qwen-image", "wan")
    }

    def takers(identity: dict[str, Any], shape: tuple[int, ...]) -> set[str]:
        return {name for name, decoder in decoders.items() if decoder.takes(identity, shape)}

    flux = {"vae": {"class_name": "AutoencoderKL"}, "scaling_factor": 0.3611, "shift_factor": 0.1159}
    wan = {"vae": {"class_name": "AutoencoderKLWan"}, "scaling_factor": 1.0, "shift_factor": None}
    qwen = {**wan, "vae": {"class_name": "AutoencoderKLQwenImage"}}
    image, video = (16, 8, 8), (16, 3, 8, 8)
    assert takers({"encoding": flux}, image) == {"flux"}
    assert takers({"encoding": wan}, video) == {"wan"} and takers({"encoding": qwen}, video) == {"qwen-image"}
    assert takers({"encoding": {**flux, "scaling_factor": 1.5305}}, image) == set(), "as that of another model"
    assert takers({"encoding": flux}, (4, 8, 8)) == takers({"encoding": {**flux, "vae": "?"}}, image) == set()
    imported = {"imported": {"format": "musubi"}}
    assert (takers(imported, image), takers(imported, video)) == ({"flux"}, {"qwen-image", "wan"})
