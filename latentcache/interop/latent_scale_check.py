"""Whether latents are scaled as their format claims: their standard deviation shows it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

from latentcache.errors import DatasetError
from latentcache.families.sdxl import SCALING_FACTOR

UNSCALED_STD = 7.7
"""Median standard deviation of unscaled SDXL latents: the scaling factor was chosen to bring it near 1."""
BORDER = UNSCALED_STD**0.5
"""Separates scaled (near 1) from unscaled (near 7.7) latents: their geometric mean, 2.77."""
FIRST_LOOK = 64
"""A wrong claim is found after so many latents, before the rest is read."""


@dataclass(slots=True)
class LatentScale:
    """The standard deviations of latents as if they were scaled. `check` is for SDXL's VAE only."""

    check: bool = True
    stds: list[float] = field(default_factory=list)
    claims: set[float | None] = field(default_factory=set)

    def add(self, latents: torch.Tensor, scaling_factor: float | None, path: str) -> None:
        """Note one latent. Raises DatasetError at the 64th if the median contradicts the claim."""
        # The value of a scaled latent, so that claims may differ between files.
        factor = SCALING_FACTOR if scaling_factor is None else 1.0
        self.stds.append(latents.float().std().item() * factor)
        self.claims.add(scaling_factor)
        if len(self.stds) == FIRST_LOOK:
            self.verify(path)

    def verify(self, path: str) -> None:
        """Raises DatasetError, with both numbers, if the median standard deviation contradicts what is claimed."""
        if not self.check or not self.stds:
            return
        median = statistics.median(self.stds)
        # A claim that is wrong shifts the value by 7.7: to 7.7 (scaled is claimed) or to 0.13 (unscaled is).
        if 1 / BORDER <= median <= BORDER:
            return
        scaled = None not in self.claims
        met, expected = (median, 1.0) if scaled else (median * UNSCALED_STD, UNSCALED_STD)
        raise DatasetError(
            path,
            f"the latents' median standard deviation is {met:.3g} (of {len(self.stds)} latents), but this format holds "
            f"{'scaled' if scaled else 'unscaled'} SDXL latents, which have about {expected:.3g}. Nothing was "
            "imported: the cache was made for another model, or is of another format. For another VAE than SDXL's give "
            "--no-scale-check",
        )

    def to_json(self) -> dict[str, Any]:
        """The median, as if the latents were scaled: near 1 for SDXL."""
        median = round(statistics.median(self.stds), 4) if self.stds else None
        return {"median_std_scaled": median, "checked": self.check}
