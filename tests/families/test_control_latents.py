"""Control images as more tokens of the denoiser: FLUX.1 Kontext's and FLUX.2's own calls, to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from helpers.family_runs import recorded
from helpers.tiny_models import tiny_model
from PIL import Image

from latentcache.families import family_named
from latentcache.families.base import Family
from latentcache.families.scaling import latents_from_moments
from latentcache.models.vae import vae_facts

NOISE = {"flux": (1, 16, 8, 8), "flux2": (1, 128, 4, 4), "flux2-dev": (1, 128, 4, 4)}


def control_images(num: int) -> list[np.ndarray]:
    """Of another shape than the image: 96x64."""
    return [np.random.default_rng(seed).integers(0, 256, (96, 64, 3), dtype=np.uint8) for seed in range(num)]


def pipeline_call(family: Family, parts: Mapping[str, Any], noise: torch.Tensor, images: list[np.ndarray]) -> Any:
    """The pipeline's own call of the denoiser, and the batch of what is cached."""
    batch = family.encode_text(parts, family.tokenize(parts, ["a red cat"]), family.text_recipe())
    scaling = vae_facts(parts["vae"]).scaling
    for number, image in enumerate(images, 1):
        # Pixels as the pipeline makes them: `/ 255 * 2 - 1`, whose last bit may differ from that of `/ 127.5 - 1`.
        pixels = diffusers.image_processor.VaeImageProcessor().preprocess(Image.fromarray(image))
        with torch.no_grad():
            moments = family.encode_image(parts["vae"], pixels)
        batch[f"control_latents_{number}"] = scaling.apply(latents_from_moments(moments))
    pictures: Any = [Image.fromarray(image) for image in images]
    size = {"height": 64, "width": 64, "num_inference_steps": 1, "output_type": "latent"}
    if family.name == "flux":
        pipeline = diffusers.FluxKontextPipeline(**parts)
        # The picture as it is: the pipeline would make it as large as what Kontext was trained with.
        size |= {"max_area": 64 * 64, "_auto_resize": False, "guidance_scale": 3.5}
        packed = pipeline._pack_latents(noise, *noise.shape)
        [pictures] = pictures
    else:
        pipeline, packed = family.pipeline(**parts), noise
        size |= family.guidance_kwargs(3.5 if family.name == "flux2-dev" else 1.0)
    with recorded(parts["transformer"]) as calls:
        pipeline(prompt="a red cat", image=pictures, latents=packed, **size)
    return calls[0], pipeline.scheduler.timesteps[:1].float(), batch


@pytest.mark.families
@pytest.mark.parametrize(("name", "num"), [("flux", 1), ("flux2", 1), ("flux2", 2), ("flux2-dev", 1)])
def test_control_latents_are_tokens_as_in_the_pipeline(name: str, num: int) -> None:
    family = family_named(name)
    parts = tiny_model(family.name)
    noise = torch.randn(NOISE[name], generator=torch.Generator().manual_seed(0))
    call, timesteps, batch = pipeline_call(family, parts, noise, control_images(num))
    with recorded(parts["transformer"]) as calls, torch.no_grad():
        found = family.predict(parts["transformer"], noise, timesteps, batch)
        plain = {key: value for key, value in batch.items() if not key.startswith("control_latents")}
        without = family.predict(parts["transformer"], noise, timesteps, plain)
    own = calls[0].arguments
    for argument in ("hidden_states", "img_ids", "txt_ids"):
        assert torch.equal(own[argument].float(), call.arguments[argument].float()), argument
    assert own["hidden_states"].shape[1] == 16 + num * 24
    assert torch.equal(calls[0].output[0], call.output[0])
    assert found.shape == noise.shape and (found - without).abs().max() > 1e-3
