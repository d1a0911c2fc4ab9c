from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from latentcache.errors import ModelError
from latentcache.families.scaling import Scaling, latents_from_moments
from latentcache.families.sdxl import FAMILY as SDXL
from latentcache.models.vae import VaeFacts, encode_images, keep_output, text_dtype, vae_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (3, 64, 96, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def moments(parts, pixels) -> torch.Tensor:
    return encode_images(parts["vae"], pixels)


def test_moments_are_those_of_the_vae(parts, pixels, moments):
    images = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1).contiguous()
    with torch.no_grad():
        expected = parts["vae"].encode(images).latent_dist.parameters
    assert torch.equal(moments, expected)
    assert moments.shape == (3, 8, 8, 12)
    assert not moments.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):  # a surrounding autocast does not count
        assert torch.equal(encode_images(parts["vae"], pixels), moments)
    # Slicing and tiling stay as the caller set them.
    vae = copy.deepcopy(parts["vae"])
    vae.enable_slicing()
    encode_images(vae, pixels)
    assert (vae.use_slicing, vae.use_tiling) == (True, False)
    vae.enable_tiling()
    assert not torch.equal(encode_images(vae, pixels), moments)


@pytest.mark.parametrize("form", ["tensor", "read-only", "flipped"])
def test_pixels_may_be_a_tensor_or_any_array(parts, pixels, form):
    given = {"tensor": torch.from_numpy(pixels), "read-only": pixels.copy(), "flipped": pixels[:, :, ::-1]}[form]
    if form == "read-only":
        given.flags.writeable = False
    plain = np.ascontiguousarray(np.asarray(given))
    assert torch.equal(encode_images(parts["vae"], given), encode_images(parts["vae"], plain.copy()))


def test_pixels_of_another_form_are_refused(parts):
    for shape, dtype in (((1, 8, 8, 3), np.float32), ((8, 8, 3), np.uint8), ((1, 3, 8, 8), np.uint8)):
        with pytest.raises(ModelError, match=r"uint8 \[B, H, W, 3\] is needed"):
            encode_images(parts["vae"], np.zeros(shape, dtype))


def test_a_sample_is_that_of_diffusers_for_its_seed_in_any_batch(moments):
    together = keep_output(moments, "sample", seeds=[5, 6, 7])["latents"]
    before = torch.get_rng_state()
    for index, seed in [(2, 7), (0, 5), (1, 6)]:
        posterior = DiagonalGaussianDistribution(moments[index : index + 1])
        assert torch.equal(together[index], posterior.sample(torch.Generator().manual_seed(seed))[0])
        alone = keep_output(moments[index : index + 1], "sample", seeds=[seed])["latents"]
        assert torch.equal(alone[0], together[index])
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(keep_output(moments, "sample", seeds=[5, 6, 8])["latents"][2], together[2])
    for seeds in (None, [1, 2]):
        with pytest.raises(ValueError, match="one seed for each"):
            keep_output(moments, "sample", seeds=seeds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 8, 5, 7), (2, 32, 3, 4, 6)], ids=["images", "clips"])
def test_draws_from_stored_moments_are_those_of_diffusers(shape, dtype):
    moments = (40 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)  # beyond the clamp too
    posterior = DiagonalGaussianDistribution(moments)
    assert torch.equal(latents_from_moments(moments), posterior.mode())
    drawn = latents_from_moments(moments, torch.Generator().manual_seed(1))
    assert torch.equal(drawn, posterior.sample(torch.Generator().manual_seed(1)))


def test_a_dtype_is_as_it_is_asked_for_or_follows_from_the_device():
    """Of a VAE that is asked for none: see tests/sim/test_vae_dtype_on_device.py."""
    for name in ("float16", "bfloat16"):
        assert vae_dtype(name, VaeFacts(Scaling(), True, 4, 8), CUDA)[0] is getattr(torch, name)
    assert text_dtype("auto", SDXL, CPU)[0] is torch.float32
    assert text_dtype("auto", SDXL, CUDA)[0] is torch.float16
    assert text_dtype("bfloat16", SDXL, CUDA)[0] is torch.bfloat16
