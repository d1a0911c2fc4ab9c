"""SDXL's numbers agree with the models that state them."""

from __future__ import annotations

import subprocess
import sys

from diffusers import AutoencoderKL

from latentcache.families import sdxl
from latentcache.models.tiny import tiny_pipeline
from latentcache.types import Crop, Geometry, Size


def test_naming_the_families_imports_no_torch() -> None:
    code = "import sys, latentcache.families; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_the_numbers_are_those_of_diffusers() -> None:
    # A default of diffusers for each, set independently of this package, or the tiny pipeline's own computation.
    pipeline = tiny_pipeline()
    assert pipeline.vae_scale_factor == sdxl.FAMILY.latent.downscale
    assert AutoencoderKL().config.latent_channels == sdxl.FAMILY.latent.channels
    assert sdxl.SCALING_FACTOR == 0.13025 and sdxl.FAMILY.max_length == 77


def test_time_ids_are_in_the_order_of_the_pipeline() -> None:
    pipeline = tiny_pipeline()
    sizes = ((480, 640), (3, 5), (512, 704))
    expected = pipeline._get_add_time_ids(
        *sizes, dtype=pipeline.unet.dtype, text_encoder_projection_dim=pipeline.text_encoder_2.config.projection_dim
    )
    original, crop, target = Size(*sizes[0]), Crop(*sizes[1]), Size(*sizes[2])
    assert expected.tolist() == [sdxl.FAMILY.size_conditions(Geometry(original, original, crop, target))]
