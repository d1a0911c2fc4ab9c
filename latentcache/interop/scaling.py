"""How other trainers scale latents before they store them, and whether a cache's latents are scaled as it claims."""

from __future__ import annotations

import math
import statistics

import torch

from latentcache.errors import ConfigError, DatasetError
from latentcache.families import DEFAULT, family_named
from latentcache.families.scaling import Scaling

UNSCALED_STD = 7.7
"""Median standard deviation of unscaled latents of DEFAULT: the scaling factor was chosen to bring it near 1."""
FIRST_LOOK = 64
"""A wrong claim is found after so many latents, before the rest is read."""

_LEAST_SPREAD = 2.0
"""Latents of some images have a standard deviation of 0.8, those of others of 1.2."""


def published_scaling(family: str) -> Scaling:
    """The scaling of the family's published VAE, whose constants trainers write into their code.

    ConfigError where it is in the VAE's weights alone.
    """
    found = family_named(family).latent.published
    if found is None:
        raise ConfigError(
            f"how latents of {family} are scaled stands in the weights of its VAE, which a foreign cache does not "
            "have: precache them",
            key="family",
        )
    return found


class ScaleCheck:
    """The check of one import of latents of `family`.

    Scaled latents have a standard deviation near 1, and unscaled ones of another number: that between is the border.
    """

    def __init__(self, family: str, *, is_wanted: bool):
        self._family, self._scaling, self._is_wanted = family, published_scaling(family), is_wanted
        self._spread = UNSCALED_STD if family == DEFAULT else _spread_of(self._scaling)
        self._stds: list[float] = []
        """The standard deviations of the latents as if all were scaled."""
        self._claims: set[bool] = set()
        self._path = ""

    def add(self, latents: torch.Tensor, is_scaled: bool, path: str) -> None:
        """Note latents of the file `path`. Raises what `check` does, after the first FIRST_LOOK."""
        scaled = latents.float() if is_scaled else self._scaling.apply(latents.float())
        self._stds.append(scaled.std().item())
        self._claims.add(is_scaled)
        self._path = path
        if len(self._stds) == FIRST_LOOK:
            self.check()

    def check(self) -> None:
        """Raises DatasetError, with both numbers, if the median standard deviation contradicts what is claimed."""
        if not self._is_wanted or not self._stds:
            return
        # Where the two are nearly one number, nothing says which of them a claim is of.
        border = max(self._spread, 1 / self._spread, _LEAST_SPREAD) ** 0.5
        median = statistics.median(self._stds)
        # A claim that is wrong shifts the value by the spread: up (scaled is claimed) or down (unscaled is).
        if 1 / border <= median <= border:
            return
        scaled = True in self._claims
        met, expected = (median, 1.0) if scaled else (median * self._spread, self._spread)
        model = self._family.upper() if self._family == DEFAULT else self._family
        raise DatasetError(
            self._path,
            f"the latents' median standard deviation is {met:.3g} (of {len(self._stds)} latents), but this format "
            f"holds {'scaled' if scaled else 'unscaled'} {model} latents, which have about {expected:.3g}. Nothing was "
            "imported: the cache was made for another model, or is of another format. For another VAE than "
            f"{model}'s give --no-scale-check",
        )


def _spread_of(scaling: Scaling) -> float:
    """The standard deviation of unscaled latents whose scaled ones have about 1."""
    if not scaling.mean:
        return 1 / scaling.scaling_factor
    mean = sum(scaling.mean) / len(scaling.mean)
    variances = (std * std + (each - mean) ** 2 for each, std in zip(scaling.mean, scaling.std, strict=True))
    return math.sqrt(sum(variances) / len(scaling.mean)) / scaling.scaling_factor
