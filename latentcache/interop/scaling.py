"""How other trainers scale latents before they store them, and whether a cache's latents are scaled as it claims."""

from __future__ import annotations

import math
import statistics

import torch

from latentcache.errors import ConfigError, DatasetError
from latentcache.families import DEFAULT
from latentcache.families.scaling import Scaling
from latentcache.families.sdxl import SCALING_FACTOR

UNSCALED_STD = 7.7
"""Median standard deviation of unscaled SDXL latents: the scaling factor was chosen to bring it near 1."""
FIRST_LOOK = 64
"""A wrong claim is found after so many latents, before the rest is read."""

_LEAST_SPREAD = 2.0
"""Latents of some images have a standard deviation of 0.8, those of others of 1.2."""
_FLUX = Scaling(0.3611, 0.1159)
# The defaults of diffusers' AutoencoderKLWan and AutoencoderKLQwenImage, which are the same.
_WAN = Scaling(
    rule="mean_std",
    mean=(
        *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
        *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
    ),
    std=(
        *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
        *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.916),
    ),
)
_PUBLISHED = {
    "sdxl": Scaling(SCALING_FACTOR),
    "sd15": Scaling(0.18215),
    **dict.fromkeys(("flux", "chroma", "z-image"), _FLUX),
    **dict.fromkeys(("qwen-image", "krea2", "wan"), _WAN),
}


def published_scaling(family: str) -> Scaling:
    """The scaling of the family's published VAE, whose constants trainers write into their code.

    ConfigError where it is in the VAE's weights alone.
    """
    if family not in _PUBLISHED:
        raise ConfigError(
            f"how latents of {family} are scaled stands in the weights of its VAE, which a foreign cache does not "
            "have: precache them",
            key="family",
        )
    return _PUBLISHED[family]


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
        model = "SDXL" if self._family == DEFAULT else self._family
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
