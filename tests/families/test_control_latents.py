"""Control images as more tokens of the denoiser: the own calls of pipelines that edit, to the last bit.

Those of families that read texts with them are in test_families.py.
"""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from helpers.family_references import generator
from helpers.family_runs import equal, recorded
from helpers.tiny_models import tiny_model
from PIL import Image

from latentcache.families import family_named
from latentcache.families.scaling import latents_from_moments
from latentcache.models.vae import vae_facts

pytestmark = pytest.mark.families

PICTURES = [
    np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    for seed, size in enumerate([(64, 96), (96, 64)])
]
"""Of other shapes than the image, which is 64x64."""


@pytest.mark.parametrize(("name", "num"), [("flux", 1), ("flux2", 2), ("flux2-dev", 1)])
def test_control_latents_are_tokens_as_in_the_pipeline(name: str, num: int) -> None:
    family, parts = family_named(name), tiny_model(name)
    noise = torch.randn((1, 16, 8, 8) if name == "flux" else (1, 128, 4, 4), generator=generator())
    shown: list[Any] = [Image.fromarray(each) for each in PICTURES[:num]]
    size: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 1, "output_type": "latent"}
    if name == "flux":  # FLUX.1 Kontext
        pipeline = diffusers.FluxKontextPipeline(**parts)
        size |= {"max_area": 64 * 64, "_auto_resize": False, "guidance_scale": 3.5, "image": shown[0]}
        size["latents"] = pipeline._pack_latents(noise, *noise.shape)
    else:
        pipeline = family.pipeline(**parts)
        size |= {"image": shown, "latents": noise, **family.guidance_kwargs(3.5 if name == "flux2-dev" else 1.0)}
    pipeline.set_progress_bar_config(disable=True)
    with recorded(parts["transformer"]) as live:
        pipeline(prompt="a red cat", **size)
    batch = family.encode_text(parts, family.tokenize(parts, ["a red cat"]), family.text_recipe())
    for number, image in enumerate(shown, 1):
        # Pixels as the pipeline makes them: `/ 255 * 2 - 1`, whose last bit may differ from that of `/ 127.5 - 1`.
        pixels = diffusers.image_processor.VaeImageProcessor().preprocess(image)
        with torch.no_grad():
            moments = family.encode_image(parts["vae"], pixels)
        batch[f"control_latents_{number}"] = vae_facts(parts["vae"]).scaling.apply(latents_from_moments(moments))
    timesteps = pipeline.scheduler.timesteps[:1].float()
    with recorded(parts["transformer"]) as own, torch.no_grad():
        found = family.predict(parts["transformer"], noise, timesteps, batch)
        changed = {**batch, "control_latents_1": 2 * batch["control_latents_1"]}
        other = family.predict(parts["transformer"], noise, timesteps, changed)
    assert own[0].arguments["hidden_states"].shape[1] == 16 + num * 24
    assert equal(own[0].arguments, live[0].arguments) and equal(own[0].output, live[0].output)
    assert found.shape == noise.shape and (found - other).abs().max() > 1e-3
