"""Stable Diffusion 1.5, with what was finetuned from it."""

from __future__ import annotations

from latentcache.families.base import VAE_WEIGHTS, LatentSpace, Part, TextField, TimestepSampling
from latentcache.families.clip import ClipFamily


class SD15(ClipFamily):
    """One CLIP encoder, whose last layer is read, and a UNet."""

    name = "sd15"
    pipeline_name = "StableDiffusionPipeline"
    pipeline_names = (
        "StableDiffusionImg2ImgPipeline",
        *(f"StableDiffusion{kind}*" for kind in ("Adapter", "ControlNet", "Inpaint", "InstructPix2Pix", "PAG")),
    )
    pipeline_options = {"requires_safety_checker": False}
    repositories = ("stable-diffusion-v1-5/stable-diffusion-v1-5",)
    parts = {
        "vae": Part("vae", "diffusers.AutoencoderKL", VAE_WEIGHTS),
        "text_encoder": Part("text_encoder", "transformers.CLIPTextModel"),
        "tokenizer": Part("tokenizer", "transformers.CLIPTokenizer"),
    }
    denoiser = "unet"
    denoiser_class = "diffusers.UNet2DConditionModel"
    denoiser_settings = {"addition_embed_type": None}
    latent = LatentSpace(4)
    vae_overflows = False  # its config is older than the setting, and its pipelines compute in float16
    fields = {"prompt_embeds": TextField("cross_attention_dim", features=(768,))}
    recipe = {"family": "sd15"}
    layers_above = 0
    timesteps = TimestepSampling("uniform")


FAMILY = SD15()
