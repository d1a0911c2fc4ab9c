"""What diffusers itself makes of an image, family by family: the code of its image-to-image pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch


class NoNoise:
    """Stands in for a scheduler where the clean latents are wanted that a pipeline would add noise to."""

    @staticmethod
    def add_noise(latents: torch.Tensor, *_: Any) -> torch.Tensor:
        return latents

    scale_noise = add_noise


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def sd15(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    image = diffusers.StableDiffusionImg2ImgPipeline(**pipeline.components, requires_safety_checker=False)
    image.scheduler = NoNoise()
    return image.prepare_latents(pixels, None, len(pixels), 1, pixels.dtype, "cpu", generator())


def sdxl(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    image = diffusers.StableDiffusionXLImg2ImgPipeline(**pipeline.components, add_watermarker=False)
    image.scheduler = NoNoise()
    return image.prepare_latents(pixels, None, len(pixels), 1, pixels.dtype, "cpu", generator())


def flux(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    return diffusers.FluxImg2ImgPipeline(**pipeline.components)._encode_vae_image(pixels, generator())


def chroma(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    return diffusers.ChromaImg2ImgPipeline(**pipeline.components)._encode_vae_image(pixels, generator())


def z_image(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    image = diffusers.ZImageImg2ImgPipeline(**pipeline.components)
    image.scheduler = NoNoise()
    size = pixels.shape[-2:]
    return image.prepare_latents(
        pixels, torch.tensor([500.0]), len(pixels), 16, *size, pixels.dtype, "cpu", generator()
    )


def qwen_image(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Of Krea 2 and Qwen-Image-Edit too, which have the same VAE and no pipeline for images."""
    names = ("vae", "text_encoder", "tokenizer", "transformer", "scheduler")
    image: Any = diffusers.QwenImageImg2ImgPipeline(**{name: pipeline.components[name] for name in names})
    return image._encode_vae_image(pixels, generator())


def wan(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    names = ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")
    video = diffusers.WanVideoToVideoPipeline(**{name: pipeline.components[name] for name in names})
    video.scheduler = NoNoise()
    size, time = pixels.shape[-2:], torch.tensor([500.0])
    return video.prepare_latents(pixels, len(pixels), 16, *size, pixels.dtype, "cpu", generator(), timestep=time)


def flux2(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    return pipeline._encode_vae_image(pixels, generator())


def anima(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """As OneTrainer scales for it, and as its decoder undoes it. Its own encoding divides by the deviation."""
    from diffusers.modular_pipelines.anima.encoders import encode_vae_image

    vae = pipeline.vae
    divided = encode_vae_image(pixels, vae, generator(), pixels.device, pixels.dtype)
    mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std))
    scaled: torch.Tensor = (vae.encode(pixels).latent_dist.mode() - mean) * (1.0 / std)
    torch.testing.assert_close(scaled, divided, rtol=0, atol=1e-6)
    return scaled


def qwen_image_21(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """As the pipeline encodes a picture, which it makes opaque."""
    return pipeline._encode_vae_image(torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1), generator())


def ernie_image(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """The inverse of what its pipeline does before it decodes: it encodes no images."""
    statistics, variance = pipeline.vae.bn, pipeline.vae.bn.running_var.view(1, -1, 1, 1)
    latents = pipeline._patchify_latents(pipeline.vae.encode(pixels).latent_dist.mode())
    return (latents - statistics.running_mean.view(1, -1, 1, 1)) / torch.sqrt(variance + 1e-5)


def ideogram4(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """The inverse of what its pipeline does before it decodes, with channels as FLUX.2's pipelines order them."""
    mean = pipeline.vae.encode(pixels).latent_dist.mode().unflatten(-2, (-1, 2)).unflatten(-1, (-1, 2))
    tokens = mean.permute(0, 2, 4, 3, 5, 1).flatten(3)  # [B, h, w, 4C]
    std = torch.sqrt(pipeline.vae.bn.running_var + pipeline.vae.config.batch_norm_eps)
    scaled = (tokens - pipeline.vae.bn.running_mean) / std
    return scaled.unflatten(3, (2, 2, -1)).permute(0, 5, 3, 4, 1, 2).flatten(1, 3)


SCALED_LATENTS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "sd15": sd15,
    "sdxl": sdxl,
    "flux": flux,
    "chroma": chroma,
    "z-image": z_image,
    "qwen-image": qwen_image,
    "qwen-image-edit": qwen_image,
    "krea2": qwen_image,
    "flux2": flux2,
    "flux2-dev": flux2,
    "wan": wan,
    "anima": anima,
    "anima-states": anima,
    "qwen-image-21": qwen_image_21,
    "wan-i2v": wan,
    "qwen-image-21-edit": qwen_image_21,
    "ernie-image": ernie_image,
    "ideogram4": ideogram4,
}
"""Scaled latents of pixels [B, 3, (F,) H, W] in -1..1. Where the pipeline draws, it does so with `generator()`."""
