"""Whether latents are scaled as a foreign cache claims, by their standard deviations."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from latentcache.errors import DatasetError
from latentcache.families import DEFAULT
from latentcache.families.scaling import Scaling
from latentcache.interop.foreign_family import spread_of

UNSCALED_STD = 7.7
"""Median standard deviation of unscaled SDXL latents: the scaling factor was chosen to bring it near 1."""
_LEAST_SPREAD = 2.0
"""Latents of some images have a standard deviation of 0.8, those of others of 1.2."""
FIRST_LOOK = 64
"""A wrong claim is found after so many latents, before the rest is read."""


class ScaleCheck:
    """The check of one import. Its latents are of `family`, and `scaling` is that of their VAE.

    Scaled latents have a standard deviation near 1, and unscaled ones of another number: that between is the border.
    """

    def __init__(self, family: str, scaling: Scaling, *, is_declared: bool, is_wanted: bool):
        self._family, self._scaling = family, scaling
        self._is_declared, self._is_wanted = is_declared, is_wanted
        self._spread = UNSCALED_STD if family == DEFAULT else spread_of(scaling)
        self._stds: list[float] = []
        """The standard deviations of the latents as if all were scaled."""
        self._claims: set[bool] = set()

    def add(self, latents: torch.Tensor, is_scaled: bool, path: str) -> None:
        """Note latents of the file `path`. Raises what `check` does, after the first FIRST_LOOK."""
        scaled = latents.float() if is_scaled else self._scaling.apply(latents.float())
        self._stds.append(scaled.std().item())
        self._claims.add(is_scaled)
        if len(self._stds) == FIRST_LOOK:
            self.check(path)

    def to_json(self) -> dict[str, Any]:
        """What a report says of it."""
        median = round(statistics.median(self._stds), 4) if self._stds else None
        return {"median_std_scaled": median, "checked": self._is_wanted}

    def check(self, path: str) -> None:
        """Raises DatasetError, with both numbers, if the median standard deviation contradicts what is claimed."""
        if not self._is_wanted or not self._stds:
            return
        # Where the two are nearly one number, nothing says which of them a claim is of.
        border = max(self._spread, 1 / self._spread, _LEAST_SPREAD) ** 0.5
        median = statistics.median(self._stds)
        # A claim that is wrong shifts the value by the spread: up (scaled is claimed) or down (unscaled is).
        if 1 / border <= median <= border:
            return
        scaled, declared = True in self._claims, self._is_declared
        unscaled = 1 / self._scaling.scaling_factor if declared and not self._scaling.mean else self._spread
        met, expected = (median, 1.0) if scaled else (median * unscaled, unscaled)
        model = "SDXL" if self._family == DEFAULT else self._family
        remedy = "the cache was made for another model, or is of another format."
        if declared:
            remedy = "correct `scaled` or `scaling_factor` of the declaration."
        raise DatasetError(
            path,
            f"the latents' median standard deviation is {met:.3g} (of {len(self._stds)} latents), but "
            f"{'the declaration says' if declared else 'this format holds'} {'scaled' if scaled else 'unscaled'} "
            f"{'latents' if declared else f'{model} latents'}, which have about {expected:.3g}. Nothing was "
            f"imported: {remedy} For another VAE than {model}'s give --no-scale-check",
        )
