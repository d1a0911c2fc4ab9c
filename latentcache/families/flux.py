"""FLUX.1 dev, schnell and Krea, and finetunes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from latentcache.families.base import Caption, Encoded, LatentSpace, TextField
from latentcache.families.clip import CLIP_SETTINGS, pooling, pooling_recipe
from latentcache.families.packed import PackedFamily, control_latents, image_ids, text_ids
from latentcache.families.parts import FLUX_VAE, KL_VAE, T5_SETTINGS, Part, TrainerFiles

_GUIDANCE = 3.5
"""Distilled guidance during training: the default of diffusers' train_dreambooth_lora_flux.py."""


class Flux(PackedFamily):
    """T5 with its padding, which the denoiser attends to, and CLIP's pooled output. The denoiser takes guidance."""

    name = "flux"
    pipeline_name = "FluxPipeline"
    pipeline_names = ("FluxImg2ImgPipeline", "FluxInpaintPipeline", "FluxKontext*", "FluxControl*", "FluxFillPipeline")
    repositories = ("black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-schnell")
    trainer_files = {
        "kohya": TrainerFiles("flux", is_scaled=True, text_suffix="_flux_te.npz", has_resolutions=True),
        "simpletuner": TrainerFiles("flux"),
        "musubi": TrainerFiles(
            "fk",
            "flux_kontext",
            is_scaled=True,
            texts={"t5_vec": "prompt_embeds", "clip_l_pooler": "pooled_prompt_embeds"},
            needs_control=True,
        ),
    }
    parts = {
        "vae": KL_VAE,
        "text_encoder": Part("text_encoder", "transformers.CLIPTextModel", settings=CLIP_SETTINGS),
        "text_encoder_2": Part("text_encoder", "transformers.T5EncoderModel", settings=T5_SETTINGS),
        "tokenizer": Part("tokenizer", "transformers.CLIPTokenizer"),
        "tokenizer_2": Part("tokenizer", "transformers.T5TokenizerFast"),
    }
    denoiser_class = "diffusers.FluxTransformer2DModel"
    latent = LatentSpace(16, published=FLUX_VAE)
    fields = {
        "prompt_embeds": TextField("joint_attention_dim", features=(4096,), encoder="text_encoder_2"),
        "pooled_prompt_embeds": TextField("pooled_projection_dim", features=(768,), has_rows=False),
    }
    max_length = 512
    can_drop_padding = False
    reads_controls = True
    no_guidance = math.inf  # guidance is an input of the denoiser

    @override
    def parts_recipe(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        return pooling_recipe(parts["text_encoder"], parts["tokenizer"])

    @override
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Caption], recipe: Mapping[str, Any]) -> Encoded:
        with pooling(parts["text_encoder"], parts["tokenizer"], recipe):
            embeds, pooled, _ = self.pipeline_texts(parts, texts, recipe)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    @override
    def text_shapes(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        widths = parts["text_encoder_2"].config.d_model, parts["text_encoder"].config.hidden_size
        return {"prompt_embeds": (recipe["max_length"], widths[0]), "pooled_prompt_embeds": (widths[1],)}

    @override
    def conditions(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        guidance = None
        if denoiser.config.guidance_embeds:
            guidance = torch.full([len(noisy)], _GUIDANCE, device=noisy.device, dtype=torch.float32)
        ids = [image_ids(noisy)]
        # Like FluxKontextPipeline, which takes one control image and numbers it 1.
        for control in control_latents(batch, noisy):
            ids.append(image_ids(control))
            ids[-1][:, 0] = len(ids) - 1
        return {
            "guidance": guidance,
            "pooled_projections": batch["pooled_prompt_embeds"],
            "encoder_hidden_states": batch["prompt_embeds"],
            "txt_ids": text_ids(batch["prompt_embeds"]),
            "img_ids": torch.cat(ids),
        }


FAMILY = Flux()
