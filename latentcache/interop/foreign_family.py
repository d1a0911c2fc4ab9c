"""Which model family a foreign cache is of, and how that family's published VAE scales latents.

Trainers write the constants of the published VAEs into their code, and scale latents by them before they store them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from latentcache.errors import ConfigError
from latentcache.families import FAMILIES
from latentcache.families.scaling import Scaling
from latentcache.families.sdxl import SCALING_FACTOR

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
    """The scaling of the family's published VAE. ConfigError where that is in its weights alone."""
    if family not in _PUBLISHED:
        raise ConfigError(
            f"how latents of {family} are scaled stands in the weights of its VAE, which a foreign cache does not "
            "have: precache them",
            key="family",
        )
    return _PUBLISHED[family]


def spread_of(scaling: Scaling) -> float:
    """The standard deviation of unscaled latents whose scaled ones have about 1."""
    if not scaling.mean:
        return 1 / scaling.scaling_factor
    mean = sum(scaling.mean) / len(scaling.mean)
    variances = (std * std + (each - mean) ** 2 for each, std in zip(scaling.mean, scaling.std, strict=True))
    return math.sqrt(sum(variances) / len(scaling.mean)) / scaling.scaling_factor


def chosen_family(asked: str | None, found: Collection[str], known: Mapping[str, str], format_name: str) -> str:
    """The family of which a format's files are: `asked`, else the only one of those that its files name.

    `found` are the architectures that its files name, and `known` maps those that can be read to families. Without any
    the first known one is taken. ConfigError for a family that the format does not have, and where files of several
    lie side by side.
    """
    allowed = [family for family in dict.fromkeys(known.values()) if family in FAMILIES]
    if asked is not None:
        return check_family(asked, allowed, format_name)
    named = [family for family in allowed if family in {known.get(each) for each in found}]
    if len(named) > 1:
        raise ConfigError(
            f"the files of {format_name} are of {', '.join(named)}, and a manifest holds one family: give --family",
            key="family",
        )
    return named[0] if named else allowed[0]


def check_family(family: str, allowed: Collection[str], format_name: str) -> str:
    """The family. ConfigError where the layout of the format's files of this family is not known."""
    if family not in allowed:
        raise ConfigError(
            f"how {format_name} lays out files of the family {family} is not known; it is for {', '.join(allowed)}",
            key="family",
        )
    return family
