"""Stable Diffusion 1.5 and finetunes of it."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from latentcache.families.base import LatentSpace, TextField, TimestepSampling
from latentcache.families.clip import CLIP_SETTINGS, ClipFamily
from latentcache.families.parts import KL_VAE, Part, TrainerFiles
from latentcache.families.scaling import Scaling


class SD15(ClipFamily):
    """The last layer of one CLIP encoder, and a UNet."""

    name = "sd15"
    pipeline_name = "StableDiffusionPipeline"
    pipeline_names = (
        "StableDiffusionImg2ImgPipeline",
        *(f"StableDiffusion{kind}*" for kind in ("Adapter", "ControlNet", "Inpaint", "InstructPix2Pix", "PAG")),
    )
    pipeline_options = {"requires_safety_checker": False}
    repositories = ("stable-diffusion-v1-5/stable-diffusion-v1-5",)
    trainer_files = {"kohya": TrainerFiles("sd"), "simpletuner": TrainerFiles("sd1x")}
    parts = {
        "vae": KL_VAE,
        "text_encoder": Part("text_encoder", "transformers.CLIPTextModel", settings=CLIP_SETTINGS),
        "tokenizer": Part("tokenizer", "transformers.CLIPTokenizer"),
    }
    denoiser = "unet"
    denoiser_class = "diffusers.UNet2DConditionModel"
    denoiser_settings = {"addition_embed_type": None}
    latent = LatentSpace(4, published=Scaling(0.18215))
    vae_overflows = False  # its config predates the setting, and its pipelines run in float16
    fields = {"prompt_embeds": TextField("cross_attention_dim", features=(768,))}
    recipe = {"family": "sd15"}
    layers_above = 0
    timesteps = TimestepSampling("uniform")

    @override
    def read_state(self, encoder: Any, output: Any, skip: int) -> torch.Tensor:
        """After the encoder's final norm, whichever layer is read."""
        found: torch.Tensor = output.last_hidden_state
        if skip:
            layers: Any = getattr(encoder, "text_model", encoder)  # before transformers 5.6 the layers are in there
            found = layers.final_layer_norm(output.hidden_states[-(skip + 1)])
        return found


FAMILY = SD15()
