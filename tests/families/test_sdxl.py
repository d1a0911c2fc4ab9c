"""SDXL's numbers agree with the models that state them, and cost no import of torch."""

from __future__ import annotations

import subprocess
import sys

from diffusers import AutoencoderKL

from latentcache.families import sdxl
from latentcache.models.tiny import tiny_pipeline


def test_importing_a_family_imports_no_torch() -> None:
    code = "import sys, latentcache.families.sdxl; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_the_numbers_are_those_of_diffusers() -> None:
    # A default of diffusers for each, set independently of this package, or the tiny pipeline's own computation.
    pipeline = tiny_pipeline()
    assert pipeline.vae_scale_factor == sdxl.DOWNSCALE_FACTOR
    assert AutoencoderKL().config.latent_channels == sdxl.LATENT_CHANNELS
    assert sdxl.SCALING_FACTOR == 0.13025 and sdxl.NUM_TOKENS == 77


def test_time_ids_are_in_the_order_of_the_pipeline() -> None:
    pipeline = tiny_pipeline()
    sizes = ((480, 640), (3, 5), (512, 704))
    expected = pipeline._get_add_time_ids(
        *sizes, dtype=pipeline.unet.dtype, text_encoder_projection_dim=pipeline.text_encoder_2.config.projection_dim
    )
    assert expected.tolist() == [sdxl.time_ids(*sizes)]
