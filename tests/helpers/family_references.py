"""Latents of an image by diffusers' own image-to-image pipelines, for each family."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import diffusers
import torch


class NoNoise:
    """A scheduler that adds no noise, to get a pipeline's clean latents."""

    @staticmethod
    def add_noise(latents: torch.Tensor, *_: Any) -> torch.Tensor:
        return latents

    scale_noise = add_noise


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def sharing(pipeline: Any, class_name: str, **options: Any) -> Any:
    """A diffusers pipeline of this class, with the parts of another one."""
    made = getattr(diffusers, class_name)
    names = inspect.signature(made.__init__).parameters.keys() & pipeline.components.keys()
    return made(**{name: pipeline.components[name] for name in names}, **options)


def encoding(class_name: str) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """For pipelines that have a method for encoding."""
    return lambda pipeline, pixels: sharing(pipeline, class_name)._encode_vae_image(pixels, generator())


def preparing(class_name: str, **options: Any) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """For pipelines that add noise while encoding."""

    def latents(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
        image = sharing(pipeline, class_name, **options)
        image.scheduler = NoNoise()
        values = {"timestep": torch.tensor([500.0]), "batch_size": len(pixels), "num_images_per_prompt": 1}
        values |= {"num_channels_latents": 16, "height": pixels.shape[-2], "width": pixels.shape[-1]}
        values |= {"dtype": pixels.dtype, "device": "cpu", "generator": generator()}
        taken = values.keys() & inspect.signature(image.prepare_latents).parameters.keys()
        return image.prepare_latents(pixels, **{name: values[name] for name in taken})

    return latents


def anima(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Scaled like OneTrainer, and like its decoder undoes it. The pipeline's encoding divides by the std instead."""
    from diffusers.modular_pipelines.anima.encoders import encode_vae_image

    vae = pipeline.vae
    divided = encode_vae_image(pixels, vae, generator(), pixels.device, pixels.dtype)
    mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std))
    scaled: torch.Tensor = (vae.encode(pixels).latent_dist.mode() - mean) * (1.0 / std)
    torch.testing.assert_close(scaled, divided, rtol=0, atol=1e-6)
    return scaled


def qwen_image_21(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Like the pipeline, which adds an opaque alpha channel."""
    return pipeline._encode_vae_image(torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1), generator())


def ernie_image(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """The inverse of the pipeline's decoding, as it does not encode images."""
    statistics, variance = pipeline.vae.bn, pipeline.vae.bn.running_var.view(1, -1, 1, 1)
    latents = pipeline._patchify_latents(pipeline.vae.encode(pixels).latent_dist.mode())
    return (latents - statistics.running_mean.view(1, -1, 1, 1)) / torch.sqrt(variance + 1e-5)


def ideogram4(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """The inverse of the pipeline's decoding, with channels ordered as in FLUX.2's pipelines."""
    mean = pipeline.vae.encode(pixels).latent_dist.mode().unflatten(-2, (-1, 2)).unflatten(-1, (-1, 2))
    tokens = mean.permute(0, 2, 4, 3, 5, 1).flatten(3)  # [B, h, w, 4C]
    std = torch.sqrt(pipeline.vae.bn.running_var + pipeline.vae.config.batch_norm_eps)
    scaled = (tokens - pipeline.vae.bn.running_mean) / std
    return scaled.unflatten(3, (2, 2, -1)).permute(0, 5, 3, 4, 1, 2).flatten(1, 3)


SCALED_LATENTS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "sd15": preparing("StableDiffusionImg2ImgPipeline", requires_safety_checker=False),
    "sdxl": preparing("StableDiffusionXLImg2ImgPipeline", add_watermarker=False),
    "flux": encoding("FluxImg2ImgPipeline"),
    "chroma": encoding("ChromaImg2ImgPipeline"),
    "z-image": preparing("ZImageImg2ImgPipeline"),
    # Krea 2 and Qwen-Image-Edit have the same VAE and no pipeline for images.
    **dict.fromkeys(("qwen-image", "qwen-image-edit", "krea2"), encoding("QwenImageImg2ImgPipeline")),
    # Pipelines that accept images themselves.
    **dict.fromkeys(("flux2", "flux2-dev"), lambda pipeline, pixels: pipeline._encode_vae_image(pixels, generator())),
    **dict.fromkeys(("wan", "wan-i2v"), preparing("WanVideoToVideoPipeline")),
    **dict.fromkeys(("anima", "anima-states"), anima),
    **dict.fromkeys(("qwen-image-21", "qwen-image-21-edit"), qwen_image_21),
    "ernie-image": ernie_image,
    "ideogram4": ideogram4,
}
"""Scaled latents of pixels [B, 3, (F,) H, W] in -1..1. Pipelines that sample use `generator()`."""
