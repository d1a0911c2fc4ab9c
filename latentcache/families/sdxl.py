"""Stable Diffusion XL: the numbers of its VAE, its text encoders and its UNet.

They are those of stabilityai/stable-diffusion-xl-base-1.0, and of every checkpoint that fits its pipeline. What a
loaded model states itself (its VAE's config) is read there; these numbers serve files that state nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SCALING_FACTOR: Final = 0.13025
"""The UNet expects the VAE's latents multiplied by this (`scaling_factor` in vae/config.json)."""
LATENT_CHANNELS: Final = 4
"""Channels of a latent (`latent_channels` in vae/config.json, `in_channels` in unet/config.json)."""
DOWNSCALE_FACTOR: Final = 8
"""Pixels of an image per row or column of its latent: three of the VAE's four stages halve the image."""
NUM_TOKENS: Final = 77
"""Tokens of a caption, with begin and end, padded and cut (`model_max_length` of both tokenizers)."""

RGB_WEIGHTS: Final = ((60, -60, 25, -70), (60, -5, 15, -50), (60, 10, -5, -35))
"""What one unit of each channel of scaled latents adds to red, green and blue (0 to 255): the VAE's decoder as a linear
map, without its upscaling. It is that of diffusers' documentation (using-diffusers/callback), for quick previews."""
RGB_BIASES: Final = (150, 140, 130)
"""Red, green and blue of a latent of zeros, from the same place."""


def time_ids(original_size: Sequence[int], crop_top_left: Sequence[int], target_size: Sequence[int]) -> list[int]:
    """The six numbers of SDXL's size conditioning, from three pairs (height, width) or (top, left).

    The order is that of diffusers' `StableDiffusionXLPipeline._get_add_time_ids`.
    """
    return [*original_size, *crop_top_left, *target_size]
