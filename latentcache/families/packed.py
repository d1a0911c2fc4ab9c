"""Denoisers that take latents as tokens, one per 2x2 patch, like FLUX.1.

Legend: B items, C latent channels, h and w latent rows and columns, S = h/2 * w/2 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from latentcache.families.base import Family
from latentcache.families.scaling import patchified, unpatchified


def packed(latents: torch.Tensor) -> torch.Tensor:
    """[B, C, h, w] -> [B, S, 4C], in the order of diffusers' `FluxPipeline._pack_latents`."""
    return patchified(latents).flatten(2).transpose(1, 2)


def unpacked(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """[B, S, 4C] -> [B, C, h, w], the inverse of `packed`."""
    rows = tokens.transpose(1, 2).reshape(len(tokens), -1, height // 2, width // 2)
    return unpatchified(rows)


def control_latents(batch: Mapping[str, Any], noisy: torch.Tensor) -> list[torch.Tensor]:
    """The batch's scaled control latents, in order, with the dtype and number of dimensions of `noisy`."""
    found: list[torch.Tensor] = []
    while (name := f"control_latents_{len(found) + 1}") in batch:
        latents = batch[name].to(noisy.dtype)
        found.append(latents.squeeze(2) if latents.ndim > noisy.ndim else latents)  # a video VAE's single frame
    return found


class PackedFamily(Family):
    """A family whose denoiser takes patches as tokens, and timesteps from 0 to 1. With frames, one per image."""

    patch = 2

    @override
    def predict(
        self, denoiser: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Mapping[str, Any]
    ) -> torch.Tensor:
        image = noisy.squeeze(2) if self.latent.is_video else noisy
        conditions = self.conditions(denoiser, image, batch)
        given = tokens = packed(image)
        if self.reads_controls:
            given = torch.cat([tokens, *map(packed, control_latents(batch, image))], dim=1)
        made = denoiser(hidden_states=given, timestep=timesteps / 1000, return_dict=False, **conditions)[0]
        found = unpacked(made[:, : tokens.shape[1]], *image.shape[-2:])
        return found.unsqueeze(2) if self.latent.is_video else found

    @override
    def final_latents(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        rows, columns = (2 * (side // (2 * self.latent.downscale)) for side in (height, width))
        found = unpacked(latents, rows, columns)
        return found.unsqueeze(2) if self.latent.is_video else found


def image_ids(latents: torch.Tensor) -> torch.Tensor:
    """Position ids [S, 3] of the tokens of latents [B, C, h, w], as in `FluxPipeline._prepare_latent_image_ids`."""
    rows, columns = (torch.arange(side // 2, device=latents.device) for side in latents.shape[-2:])
    places = torch.cartesian_prod(rows, columns)
    return torch.nn.functional.pad(places, (1, 0)).to(latents.dtype)


def text_ids(embeds: torch.Tensor) -> torch.Tensor:
    """Position ids [L, 3] of texts [B, L, D], all zero."""
    return torch.zeros(embeds.shape[1], 3, device=embeds.device, dtype=embeds.dtype)
