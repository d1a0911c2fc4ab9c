"""Control images as more tokens of the denoiser: the own calls of pipelines that edit, to the last bit.

One control image of the families that read texts with it is in test_families.py too.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from helpers.family_runs import equal, recorded
from helpers.tiny_models import randomised, tiny_model
from PIL import Image

from latentcache.errors import ModelError
from latentcache.families import family_named
from latentcache.families.base import Family
from latentcache.families.scaling import latents_from_moments
from latentcache.models.vae import vae_facts

pytestmark = pytest.mark.families

NOISE = {
    "flux": (1, 16, 8, 8),
    **dict.fromkeys(("flux2", "flux2-dev"), (1, 128, 4, 4)),
    "qwen-image-edit": (1, 16, 1, 8, 8),
    "qwen-image-21-edit": (1, 64, 1, 4, 4),
}
PICTURES = [
    np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    for seed, size in enumerate([(64, 96), (96, 64)])
]
"""Of other shapes than the image, which is 64x64."""


def pipeline_call(
    family: Family, parts: Mapping[str, Any], noise: torch.Tensor, shown: list[Image.Image], patch: pytest.MonkeyPatch
) -> tuple[Any, torch.Tensor]:
    """The pipeline's own call of the denoiser with pictures as large as they are, and its timestep."""
    pipeline, packed, images = family.pipeline(**parts), noise, shown
    size: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 1, "output_type": "latent"}
    if family.name == "flux":
        pipeline = diffusers.FluxKontextPipeline(**parts)
        size |= {"max_area": 64 * 64, "_auto_resize": False, "guidance_scale": 3.5}
        packed, [images] = pipeline._pack_latents(noise, *noise.shape), shown
    elif family.name == "qwen-image-edit":
        scaling = vae_facts(parts["vae"]).scaling
        patch.setattr(importlib.import_module(type(pipeline).__module__), "VAE_IMAGE_SIZE", 64 * 96)
        # Its own scaling, `(z - mean) / std`, has other last bits than that of images.

        def encoded(image: torch.Tensor, generator: Any) -> torch.Tensor:
            return scaling.apply(pipeline.vae.encode(image).latent_dist.mode())

        patch.setattr(pipeline, "_encode_vae_image", encoded)
        packed = pipeline._pack_latents(noise[:, :, 0], 1, 16, 8, 8)
    elif family.name == "qwen-image-21-edit":
        sizes = {each.width / each.height: (each.width, each.height, None) for each in shown}
        module = importlib.import_module(type(pipeline).__module__)
        patch.setattr(module, "calculate_dimensions", lambda area, ratio: sizes[ratio])
        size["use_kv_cache"], packed = False, noise.flatten(2).transpose(1, 2)
    else:
        size |= family.guidance_kwargs(3.5 if family.name == "flux2-dev" else 1.0)
    pipeline.set_progress_bar_config(disable=True)
    with recorded(parts["transformer"]) as calls:
        pipeline(prompt="a red cat", image=images, latents=packed, **size)
    return calls[0], pipeline.scheduler.timesteps[:1].float()


def cached_batch(family: Family, parts: Mapping[str, Any], shown: list[Image.Image]) -> dict[str, Any]:
    """The batch of what is cached."""
    if family.text_reads_control:
        tokens = family.tokenize_with_control(parts, ["a red cat"], [[np.asarray(each) for each in shown]])
    else:
        tokens = family.tokenize(parts, ["a red cat"])
    batch = family.encode_text(parts, tokens, family.text_recipe())
    for number, image in enumerate(shown, 1):
        # Pixels as the pipeline makes them: `/ 255 * 2 - 1`, whose last bit may differ from that of `/ 127.5 - 1`.
        pixels = diffusers.image_processor.VaeImageProcessor().preprocess(image)
        with torch.no_grad():
            moments = family.encode_image(parts["vae"], pixels.unsqueeze(2) if family.latent.is_video else pixels)
        batch[f"control_latents_{number}"] = vae_facts(parts["vae"]).scaling.apply(latents_from_moments(moments))
    return batch


@pytest.mark.parametrize(
    ("name", "num", "settings"),
    [
        ("flux", 1, {}),  # FLUX.1 Kontext
        ("flux2", 2, {}),
        ("flux2-dev", 1, {}),
        ("qwen-image-edit", 2, {}),
        ("qwen-image-edit", 2, {"zero_cond_t": True}),  # 2511: control images at timestep 0, found by their shapes
        ("qwen-image-21-edit", 2, {}),
    ],
)
def test_control_latents_are_tokens_as_in_the_pipeline(
    name: str, num: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, parts = family_named(name), tiny_model(name)
    if settings:
        config = {**parts["transformer"].config, **settings}
        parts["transformer"] = randomised(type(parts["transformer"]).from_config(config), 1).eval()
    noise = torch.randn(NOISE[name], generator=torch.Generator().manual_seed(0))
    shown = [Image.fromarray(each) for each in PICTURES[:num]]
    call, timesteps = pipeline_call(family, parts, noise, shown, monkeypatch)
    batch = cached_batch(family, parts, shown)
    with recorded(parts["transformer"]) as calls, torch.no_grad():
        found = family.predict(parts["transformer"], noise, timesteps, batch)
        changed = {**batch, "control_latents_1": 2 * batch["control_latents_1"]}
        other = family.predict(parts["transformer"], noise, timesteps, changed)
    own = calls[0].arguments
    assert own["hidden_states"].shape[1] == 16 + num * 24
    assert own.keys() == call.arguments.keys()
    # The rows at control images' slots may have other values: the denoiser puts control images over them.
    compared = own.keys() - ({"encoder_hidden_states"} if "image_slots" in batch else set())
    for argument in compared:
        assert equal(own[argument], call.arguments[argument]), argument
    assert equal(calls[0].output, call.output)
    assert found.shape == noise.shape and (found - other).abs().max() > 1e-3
    if "image_slots" in batch:  # no row of an image is stored: six slots for each
        assert batch["prompt_embeds"].shape[1] + 6 * num == call.arguments["encoder_hidden_states"].shape[1]


def test_texts_that_were_read_with_other_images_are_refused() -> None:
    family, parts = family_named("qwen-image-21-edit"), tiny_model("qwen-image-21-edit")
    batch = cached_batch(family, parts, [Image.fromarray(PICTURES[0])])
    noise, timesteps = torch.zeros(1, 64, 1, 4, 4), torch.tensor([500.0])
    more = {**batch, "control_latents_2": batch["control_latents_1"]}
    with pytest.raises(ModelError, match=r"read with 1 control images, but the batch has 2\. Run `latentcache prec"):
        family.predict(parts["transformer"], noise, timesteps, more)
    twice = {name: torch.cat([batch[name]] * 2) for name in batch}
    twice["image_slots"][1] += 1
    with pytest.raises(ModelError, match=r"of one batch have their images after \[\d+\] and after other rows"):
        family.predict(parts["transformer"], torch.cat([noise] * 2), timesteps.repeat(2), twice)
