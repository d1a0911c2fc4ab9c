"""Latents and texts of other trainers' files in the shape that their model family has here, and back."""

from __future__ import annotations

from pathlib import Path

import torch

from latentcache.errors import ForeignFileRefused
from latentcache.families import family_named
from latentcache.families.base import Family
from latentcache.interop.foreign_files import corrupt, tensor_in


def keeps_padding(family_name: str) -> bool:
    """Whether texts of the family are stored with their padding."""
    return all(field.padding is None for field in family_named(family_name).fields.values())


def image_latents(family: Family, value: object, path: str | Path, *, has_frames: bool | None = None) -> torch.Tensor:
    """Latents [C, (1,) h, w] of a file, where they have frames or not; by default if the family's denoiser takes clips.

    Raises ForeignFileRefused, also for several frames and for another number of channels.
    """
    has_frames = family.has_clips if has_frames is None else has_frames
    latents = tensor_in(value, "the latent", path, ndim=4 if has_frames else 3)
    if len(latents) != family.latent.channels:
        channels = f"{len(latents)} channels, and those of {family.name} have {family.latent.channels}"
        raise corrupt(path, f"its latents have {channels}: name its family (--family), if it is of another")
    if has_frames and latents.shape[1] != 1:
        detail = f"it has {latents.shape[1]} latent frames: images alone are imported"
        raise ForeignFileRefused(path, "unsupported-format", detail)
    return latents.unsqueeze(1) if family.latent.is_video and not has_frames else latents


def file_latents(family: Family, latents: torch.Tensor) -> torch.Tensor:
    """The inverse of `image_latents`, by its default."""
    return latents.squeeze(1) if family.latent.is_video and not family.has_clips else latents


def latent_mask(pixels: torch.Tensor, latents: torch.Tensor, downscale: int, path: str | Path) -> torch.Tensor:
    """The mask uint8 [1, h, w] of latents [..., h, w]: the means of its pixels [h * downscale, w * downscale].

    Raises ForeignFileRefused for another size, and for numbers that are not from 0 to 1.
    """
    sides = [side * downscale for side in latents.shape[-2:]]
    if list(pixels.shape) != sides or not bool(((pixels >= 0) & (pixels <= 1)).all()):
        raise corrupt(path, f"its mask is {list(pixels.shape)}; it must be {sides} of numbers from 0 to 1")
    return (torch.nn.functional.avg_pool2d(pixels.float()[None], downscale) * 255 + 0.5).to(torch.uint8)


def caption_rows(family: Family, embeds: torch.Tensor, mask: object, path: str | Path) -> torch.Tensor:
    """The rows of a caption's embeddings [1, L, ...] that are stored: all, or for most families those of its own text.

    `mask` has a number for each row. Without one (None) padding is zeros. Raises ForeignFileRefused, also for zeros in
    place of padding that the family's denoiser attends to: that is another recipe than diffusers'.
    """
    if len(embeds) != 1:
        raise corrupt(path, f"it holds {len(embeds)} captions; one is expected")
    rows: torch.Tensor = embeds[0]
    if keeps_padding(family.name):
        if not family.is_exact and rows.any() and not rows[-1].any():
            detail = f"its padding is zeros, which diffusers' {family.name} does not make: cache texts without a mask"
            raise ForeignFileRefused(path, "unsupported-format", detail)
        return rows
    if mask is None:
        kept = rows.flatten(1).any(dim=1)
        return rows[: int(kept.nonzero().max()) + 1 if kept.any() else 0]
    if not isinstance(mask, torch.Tensor) or mask.numel() != len(rows):
        said = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise corrupt(path, f"its mask is {said}, for {len(rows)} rows")
    return rows[mask.flatten().bool()]
