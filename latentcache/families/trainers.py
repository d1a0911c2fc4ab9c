"""What other trainers write of a family into their code and their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from latentcache.families.scaling import Scaling

FLUX_VAE = Scaling(0.3611, 0.1159)
WAN_VAE = Scaling(
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
"""The defaults of diffusers' AutoencoderKLWan and AutoencoderKLQwenImage, which are the same."""


@dataclass(frozen=True, slots=True)
class TrainerFiles:
    """How the cache of another trainer has this family.

    The names of files say `architecture`, and the metadata `title`, where there is some. `is_scaled`: latents are. The
    names of texts' files end with `text_suffix`, and `texts` maps the names in them to fields. `has_resolutions`: names
    in files of latents end with the resolution. `has_mask`: that in a file of a text says which rows are padding.
    `needs_control`: the trainer trains it with a control image only.
    """

    architecture: str
    title: str = ""
    is_scaled: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)
    text_suffix: str = ""
    has_resolutions: bool = False
    has_mask: bool = True
    needs_control: bool = False
