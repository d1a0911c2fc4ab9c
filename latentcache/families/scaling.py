"""How stored latents become what the denoiser expects: rules as data, in diffusers' own order of operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch

from latentcache.families import Rule


@dataclass(frozen=True, slots=True)
class Scaling:
    """How latents z, as the VAE's encoder gave them, are scaled for the denoiser.

    `factor`: `(z - shift_factor) * scaling_factor`, as diffusers' training scripts of AutoencoderKL do it; with
    statistics `(z - mean) * scaling_factor / std`, as its train_dreambooth_lora_sdxl.py does it.
    `mean_std`: `(z - mean) * (1 / std)` for each channel, as its pipelines of Qwen-Image and Wan do it.
    `divided`: `(z - mean) / std` for each channel, as its pipeline of Qwen-Image 2.1 does it.
    `batch_norm`: 2x2 patches become channels, then `(z - mean) / std`, as its pipelines of FLUX.2 do it.
    Latents are [..., C, h, w], and [..., C, F, h, w] for `mean_std` and `divided`.
    """

    scaling_factor: float = 1.0
    shift_factor: float | None = None
    rule: Rule = "factor"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def apply(self, latents: torch.Tensor) -> torch.Tensor:
        """Scaled latents: of the same shape, with `batch_norm` [..., 4C, h/2, w/2]."""
        if self.rule == "factor" and self.mean:
            mean, std = self._statistics(latents)
            return (latents - mean) * self.scaling_factor / std
        if self.rule == "factor":
            shifted = latents if self.shift_factor is None else latents - self.shift_factor
            return shifted * self.scaling_factor
        if self.rule == "batch_norm":
            latents = patchified(latents)
        mean, std = self._statistics(latents)
        # Multiplied by the reciprocal, or divided: the last bit differs.
        return (latents - mean) * (1.0 / std) if self.rule == "mean_std" else (latents - mean) / std

    def undo(self, latents: torch.Tensor) -> torch.Tensor:
        """What the VAE's decoder takes for scaled latents, computed in their dtype."""
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
        """What `to_json` gave."""
        statistics = {name: tuple(value[name]) for name in ("mean", "std") if name in value}
        return cls(**{**value, **statistics})


@lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """These numbers on the device, copied once. Any stream may use them: the copy has ended."""
    with torch.inference_mode(False):
        return torch.tensor(values).to(dtype).to(device)


def patchified(latents: torch.Tensor) -> torch.Tensor:
    """[..., C, h, w] -> [..., 4C, h/2, w/2]: the order of diffusers' `Flux2Pipeline._patchify_latents`."""
    *batch, channels, height, width = latents.shape
    parts = latents.reshape(*batch, channels, height // 2, 2, width // 2, 2)
    return parts.movedim((-3, -1), (-4, -3)).reshape(*batch, 4 * channels, height // 2, width // 2)


def unpatchified(latents: torch.Tensor) -> torch.Tensor:
    """The inverse of `patchified`."""
    *batch, channels, height, width = latents.shape
    parts = latents.reshape(*batch, channels // 4, 2, 2, height, width)
    return parts.movedim((-4, -3), (-3, -1)).reshape(*batch, channels // 4, 2 * height, 2 * width)


def latents_from_moments(moments: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Unscaled latents [B, C, ...] of moments [B, 2C, ...]: the mean, or with a generator one draw.

    The bits are those of diffusers' DiagonalGaussianDistribution, by `mode()` and `sample(generator)`. A reader of
    batches needs no diffusers for them.
    """
    mean = moments.chunk(2, dim=1)[0]
    if generator is None:
        return mean.contiguous()
    noise = torch.randn(mean.shape, generator=generator, device=generator.device, dtype=moments.dtype)
    return mean + posterior_std(moments) * noise.to(moments.device)


def posterior_std(moments: torch.Tensor) -> torch.Tensor:
    """The standard deviation of a draw at each place, unscaled: [B, C, ...] of moments [B, 2C, ...]."""
    log_variance = moments.chunk(2, dim=1)[1].clamp(-30.0, 20.0)  # as diffusers
    return torch.exp(0.5 * log_variance)
