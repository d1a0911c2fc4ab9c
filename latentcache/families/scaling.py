"""How stored latents are scaled for the denoiser: rules as data, in diffusers' own order of operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch

from latentcache.families import Rule


@dataclass(frozen=True, slots=True)
class Scaling:
    """How unscaled latents z from the VAE's encoder are scaled for the denoiser, by one of diffusers' rules.

    `factor`: `(z - shift_factor) * scaling_factor`, as in the training scripts for AutoencoderKL; with statistics
    `(z - mean) * scaling_factor / std`, as in train_dreambooth_lora_sdxl.py.
    `mean_std`: `(z - mean) * (1 / std)` per channel, as in the pipelines of Qwen-Image and Wan.
    `divided`: `(z - mean) / std` per channel, as in the pipeline of Qwen-Image 2.1.
    `batch_norm`: 2x2 patches become channels, then `(z - mean) / std`, as in the pipelines of FLUX.2.
    Latents are [..., C, h, w], or [..., C, F, h, w] for `mean_std` and `divided`.
    """

    scaling_factor: float = 1.0
    shift_factor: float | None = None
    rule: Rule = "factor"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def apply(self, latents: torch.Tensor) -> torch.Tensor:
        """Scaled latents, of the same shape; with `batch_norm` [..., 4C, h/2, w/2]."""
        if self.rule == "factor" and self.mean:
            mean, std = self._statistics(latents)
            return (latents - mean) * self.scaling_factor / std
        if self.rule == "factor":
            shifted = latents if self.shift_factor is None else latents - self.shift_factor
            return shifted * self.scaling_factor
        if self.rule == "batch_norm":
            latents = patchified(latents)
        mean, std = self._statistics(latents)
        # Multiplying by the reciprocal and dividing differ in the last bit.
        return (latents - mean) * (1.0 / std) if self.rule == "mean_std" else (latents - mean) / std

    def undo(self, latents: torch.Tensor) -> torch.Tensor:
        """Unscaled latents for the VAE's decoder, computed in the dtype of `latents`."""
        if self.rule == "factor" and self.mean:
            mean, std = self._statistics(latents)
            return latents * std / self.scaling_factor + mean
        if self.rule == "factor":
            divided = latents / self.scaling_factor
            return divided + self.shift_factor if self.shift_factor else divided
        mean, std = self._statistics(latents)
        if self.rule == "mean_std":
            return latents / (1.0 / std) + mean
        unscaled = latents * std + mean
        return unscaled if self.rule == "divided" else unpatchified(unscaled)

    def _statistics(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (-1, 1, 1, 1) if self.rule in ("mean_std", "divided") else (-1, 1, 1)
        mean, std = (_constant(values, latents.device, latents.dtype).view(shape) for values in (self.mean, self.std))
        return mean, std

    def to_json(self) -> dict[str, Any]:
        """The scaling as JSON."""
        return {name: value for name, value in asdict(self).items() if value not in (None, ())}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Scaling:
        """The inverse of `to_json`."""
        statistics = {name: tuple(value[name]) for name in ("mean", "std") if name in value}
        return cls(**{**value, **statistics})


@lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """These numbers on the device, copied once. The copy is synchronous, so any stream may use them."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32).to(dtype).to(device)


def patchified(latents: torch.Tensor) -> torch.Tensor:
    """[..., C, h, w] -> [..., 4C, h/2, w/2], ordered like diffusers' `Flux2Pipeline._patchify_latents`."""
    *batch, channels, height, width = latents.shape
    parts = latents.reshape(*batch, channels, height // 2, 2, width // 2, 2)
    return parts.movedim((-3, -1), (-4, -3)).reshape(*batch, 4 * channels, height // 2, width // 2)


def unpatchified(latents: torch.Tensor) -> torch.Tensor:
    """The inverse of `patchified`."""
    *batch, channels, height, width = latents.shape
    parts = latents.reshape(*batch, channels // 4, 2, 2, height, width)
    return parts.movedim((-4, -3), (-3, -1)).reshape(*batch, channels // 4, 2 * height, 2 * width)


def latents_from_moments(moments: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Unscaled latents [B, C, ...] from moments [B, 2C, ...]: the mean, or a sample if there is a generator.

    Bit for bit the `mode()` and `sample(generator)` of diffusers' DiagonalGaussianDistribution, without diffusers.
    """
    mean = moments.chunk(2, dim=1)[0]
    if generator is None:
        return mean.contiguous()
    noise = torch.randn(mean.shape, generator=generator, device=generator.device, dtype=moments.dtype)
    return mean + posterior_std(moments) * noise.to(moments.device)


def posterior_std(moments: torch.Tensor) -> torch.Tensor:
    """The posterior's standard deviation, unscaled: [B, C, ...] from moments [B, 2C, ...]."""
    log_variance = moments.chunk(2, dim=1)[1].clamp(-30.0, 20.0)  # as in diffusers
    return torch.exp(0.5 * log_variance)
