"""Encodes captions, and generates images from embeddings, each in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from latentcache.config import ValidationConfig
from latentcache.devices.placement import device_of, placed
from latentcache.families import DEFAULT, family_named
from latentcache.validation.sample_images import PromptEmbeddings, SampleImage, decode_samples, denoise

HIDDEN_SIZE, HIDDEN_SIZE_2 = 32, 40
"""Widths of the tiny model's text encoders."""


def encode_captions(
    parts: Mapping[str, Any], captions: Sequence[str], *, clip_skip: int = 0, **options: Any
) -> dict[str, torch.Tensor]:
    family = family_named(DEFAULT)
    return family.encode_text(parts, family.tokenize(parts, captions), {"clip_skip": clip_skip}, **options)


def generate(
    unet: torch.nn.Module,
    vae: torch.nn.Module,
    scheduler: Any,
    embeddings: Sequence[PromptEmbeddings],
    settings: ValidationConfig,
) -> list[SampleImage]:
    """Call `denoise`, then `decode_samples` with the VAE on the UNet's device."""
    latents = denoise(unet, scheduler, embeddings, settings)
    with placed(vae, device_of(unet)):
        return decode_samples(vae, latents, embeddings, settings)
