"""Stable Diffusion XL and finetunes of it, such as Pony and Illustrious."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from latentcache.errors import ModelError
from latentcache.families.base import LatentSpace, Preview, TextField, TimestepSampling
from latentcache.families.clip import CLIP_SETTINGS, ClipFamily
from latentcache.families.parts import KL_VAE, Part, TrainerFiles
from latentcache.families.scaling import Scaling
from latentcache.types import Geometry

SCALING_FACTOR = 0.13025
"""Default scaling of latents, for files that do not state it (`scaling_factor` in vae/config.json)."""


class SDXL(ClipFamily):
    """The concatenated penultimate layers of two CLIP encoders, and a UNet that also takes six size conditions."""

    name = "sdxl"
    pipeline_name = "StableDiffusionXLPipeline"
    pipeline_names = ("StableDiffusionXL*",)
    pipeline_options = {"add_watermarker": False}
    repositories = ("stabilityai/stable-diffusion-xl-base-1.0",)
    trainer_files = {"kohya": TrainerFiles("sdxl", text_suffix="_te_outputs.npz"), "simpletuner": TrainerFiles("sdxl")}
    parts = {
        "vae": KL_VAE,
        "text_encoder": Part("text_encoder", "transformers.CLIPTextModel", settings=CLIP_SETTINGS),
        "text_encoder_2": Part("text_encoder", "transformers.CLIPTextModelWithProjection", settings=CLIP_SETTINGS),
        "tokenizer": Part("tokenizer", "transformers.CLIPTokenizer"),
        "tokenizer_2": Part("tokenizer", "transformers.CLIPTokenizer"),
    }
    denoiser = "unet"
    denoiser_class = "diffusers.UNet2DConditionModel"
    # The linear preview is from diffusers' documentation (using-diffusers/callback).
    latent = LatentSpace(
        4,
        preview=Preview(
            ((60, -60, 25, -70), (60, -5, 15, -50), (60, 10, -5, -35)), (150, 140, 130), scaling_factor=SCALING_FACTOR
        ),
        published=Scaling(SCALING_FACTOR),
    )
    fields = {
        "prompt_embeds": TextField("cross_attention_dim", features=(2048,)),
        "pooled_prompt_embeds": TextField(features=(1280,), has_rows=False, encoder="text_encoder_2"),
    }
    layers_above = 1
    has_zero_negative = True
    timesteps = TimestepSampling("uniform")

    @override
    def read_state(self, encoder: Any, output: Any, skip: int) -> torch.Tensor:
        found: torch.Tensor = output.hidden_states[-(skip + 2)]
        return found

    @override
    def text_columns(self, field: str, encoders: Mapping[str, Any]) -> dict[str, slice]:
        """Like `Family.text_columns`. In published models encoder 1 makes the first 768 columns of prompt_embeds.

        Encoder 2 makes the rest and the pooled output.
        """
        if field != "prompt_embeds":  # raises for an unknown field
            return super().text_columns(field, encoders)
        first, second = self.names("text_encoder")
        if first in encoders:
            end = encoders[first].config.hidden_size
        elif second in encoders:
            end = -encoders[second].config.hidden_size
        else:
            raise ModelError(f"pass {first} or {second}: its config says how many columns of {field} it makes")
        return {first: slice(0, end), second: slice(end, None)}

    @override
    def size_conditions(self, geometry: Geometry) -> list[int]:
        """Original size, crop and target size, ordered like in the pipeline's `_get_add_time_ids`."""
        return [*geometry.original_size, *geometry.seen_crop, *geometry.target_size]

    @override
    def conditions(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Like `Family.conditions`. Sizes stay in float32: bfloat16 cannot represent every integer above 256."""
        added = {"text_embeds": batch["pooled_prompt_embeds"], "time_ids": batch["add_time_ids"]}
        return {"encoder_hidden_states": batch["prompt_embeds"], "added_cond_kwargs": added}

    @override
    def check_settings(self, settings: Mapping[str, Any]) -> str | None:
        if settings.get("addition_embed_type") != "text_time":
            return "has no addition_embed_type 'text_time', so it is a UNet of Stable Diffusion 1 or 2"
        return super().check_settings(settings)


FAMILY = SDXL()
