"""Captions to embeddings, and embeddings to images, each in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from latentcache.config import ValidationConfig
from latentcache.devices.placement import device_of, placed
from latentcache.models.clip import encode_tokens, tokenize
from latentcache.models.model_loader import TextParts
from latentcache.validation.sample_images import PromptEmbeddings, SampleImage, decode_samples, denoise


def encode_captions(parts: TextParts, captions: Sequence[str], **options: Any) -> dict[str, torch.Tensor]:
    return encode_tokens(parts, tokenize(parts, captions), **options)


def generate(
    unet: torch.nn.Module,
    vae: torch.nn.Module,
    scheduler: Any,
    embeddings: Sequence[PromptEmbeddings],
    settings: ValidationConfig,
) -> list[SampleImage]:
    """`denoise`, then `decode_samples` with the VAE on the UNet's device."""
    latents = denoise(unet, scheduler, embeddings, settings)
    with placed(vae, device_of(unet)):
        return decode_samples(vae, latents, embeddings, settings)
