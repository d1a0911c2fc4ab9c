"""Stable Diffusion 1.5, with what was finetuned from it."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from latentcache.families.base import VAE_WEIGHTS, LatentSpace, Part, TextField, TimestepSampling
from latentcache.families.clip import ClipFamily
from latentcache.families.tiny_parts import clip_text_model, clip_tokenizer, frozen, image_vae, randomised, seeded

_TINY_WIDTH = 32


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

    @override
    def tiny(self, seed: int = 0) -> dict[str, Any]:
        import diffusers

        tokenizer = clip_tokenizer()
        with seeded(seed):
            encoder = clip_text_model(tokenizer, _TINY_WIDTH)
            vae = image_vae(self.latent.channels, scaling_factor=0.18215)
            unet = diffusers.UNet2DConditionModel(
                sample_size=8,
                layers_per_block=1,
                block_out_channels=(16, 32),
                down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
                attention_head_dim=4,
                cross_attention_dim=_TINY_WIDTH,
                norm_num_groups=8,
            )
        scheduler = diffusers.DDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
        )
        parts = {"vae": vae, "text_encoder": encoder, "tokenizer": tokenizer}
        return frozen({**parts, "unet": randomised(unet, seed), "scheduler": scheduler})


FAMILY = SD15()
