from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from latentcache.families.scaling import latents_from_moments
from latentcache.models.tiny import tiny_parts
from latentcache.models.vae import (
    encode_images,
    keep_output,
    problems,
)


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


def test_a_surrounding_autocast_does_not_count(parts, pixels, moments):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = encode_images(parts["vae"], pixels)
    assert torch.equal(inside, moments)


def test_a_sample_is_that_of_diffusers_for_its_seed(moments):
    latents = keep_output(moments, "sample", seeds=[5, 6, 7])["latents"]
    for index, seed in enumerate([5, 6, 7]):
        posterior = DiagonalGaussianDistribution(moments[index : index + 1])
        assert torch.equal(latents[index], posterior.sample(torch.Generator().manual_seed(seed))[0])


def test_a_sample_does_not_depend_on_its_batch_or_on_the_global_random_state(moments):
    together = keep_output(moments, "sample", seeds=[5, 6, 7])["latents"]
    before = torch.get_rng_state()
    for index, seed in [(2, 7), (0, 5), (1, 6)]:
        alone = keep_output(moments[index : index + 1], "sample", seeds=[seed])["latents"]
        assert torch.equal(alone[0], together[index])
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(keep_output(moments, "sample", seeds=[5, 6, 8])["latents"][2], together[2])


@pytest.mark.parametrize("seeds", [None, [1, 2]])
def test_a_sample_needs_a_seed_for_each_item(moments, seeds):
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


def test_problems_name_what_is_wrong_with_each_item():
    outputs = torch.randn(5, 4, 2, 2)
    outputs[1, 0, 0, 0] = torch.nan
    outputs[2, 3, 1, 1] = -torch.inf
    outputs[3] = 0
    outputs[4, 0] = 0
    assert problems(outputs) == [None, "nan", "inf", "all-zero", None]


def test_an_overflow_in_float16_is_found_and_float32_is_fine(pixels):
    vae = tiny_parts()["vae"]
    with torch.no_grad():
        vae.encoder.conv_in.weight.mul_(1e6)  # like SDXL's: its activations pass 65504
    single = encode_images(vae, pixels)
    half = encode_images(copy.deepcopy(vae).half(), pixels)
    assert problems(single) == [None] * 3
    assert set(problems(half)) <= {"nan", "inf"}
