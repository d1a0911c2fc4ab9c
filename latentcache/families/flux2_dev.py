"""FLUX.2 dev: FLUX.2 with Mistral as its text encoder and guidance as an input of the denoiser."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from latentcache.families.base import TextField
from latentcache.families.flux2 import Flux2
from latentcache.families.parts import LLM_SETTINGS, Part, layers_below


class Flux2Dev(Flux2):
    """Mistral reads the text after a system prompt, whose rows are kept.

    The model's folder holds a processor, which needs torchvision. Here only its tokenizer is loaded.
    """

    name = "flux2-dev"
    pipeline_name = "Flux2Pipeline"
    pipeline_names = pipeline_settings = ()
    repositories = ("black-forest-labs/FLUX.2-dev",)
    layers, stack = (10, 20, 30), "language_model.layers"
    fields = {"prompt_embeds": TextField("joint_attention_dim", features=(15360,))}
    denoiser_settings, no_guidance = {"guidance_embeds": True}, math.inf  # guidance is an input of the denoiser
    parts = {
        "vae": Flux2.parts["vae"],
        "text_encoder": Part(
            "text_encoder",
            "transformers.Mistral3ForConditionalGeneration",
            layers_below("model.language_model.", max(layers)),
            LLM_SETTINGS,
        ),
        "tokenizer": Part("tokenizer", "transformers.AutoTokenizer"),
    }
    recipe = {"layers": " ".join(map(str, layers))}

    @override
    def rendered(self, parts: Mapping[str, Any], text: str) -> str:
        """With the pipeline's own system prompt."""
        module: Any = importlib.import_module("diffusers.pipelines.flux2.pipeline_flux2")
        made: str = parts["tokenizer"].apply_chat_template(
            module.format_input([text])[0], tokenize=False, add_generation_prompt=False
        )
        return made

    @override
    def final_latents(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Scaled latents [B, 4C, h, w] from the pipeline's tokens [B, h * w, 4C]."""
        pixels = 2 * self.latent.downscale
        return latents.transpose(1, 2).reshape(len(latents), -1, height // pixels, width // pixels)


FAMILY = Flux2Dev()
