from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from helpers.tiny_models import tiny_encoders

from latentcache.errors import EncodeError, ModelError
from latentcache.families.scaling import Scaling, latents_from_moments
from latentcache.families.sdxl import FAMILY as SDXL
from latentcache.models.vae import (
    VaeFacts,
    decode_fitting,
    decode_latents,
    encode_images,
    keep_output,
    text_dtype,
    vae_dtype,
)

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


def test_pixels_may_be_a_tensor_or_any_array(parts, pixels):
    (locked := pixels.copy()).flags.writeable = False
    for given in (torch.from_numpy(pixels), locked, pixels[:, :, ::-1]):
        plain = np.ascontiguousarray(np.asarray(given)).copy()
        assert torch.equal(encode_images(parts["vae"], given), encode_images(parts["vae"], plain))


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


# Latents -> images: a VAE that is left as it was. The bits: see tests/validation/test_sample_images.py.


F16, F32 = torch.float16, torch.float32


@pytest.fixture
def vae(parts: dict) -> Any:
    return copy.deepcopy(parts["vae"])


@pytest.fixture
def latents() -> torch.Tensor:
    return torch.randn(1, 4, 8, 12, generator=torch.Generator().manual_seed(0))


def state_of(vae: Any) -> dict[str, Any]:
    """Everything that a decode must leave alone."""
    return {
        "tensors": [(id(p), p.dtype, p.device, p.data_ptr()) for p in vae.parameters()],
        "values": [p.detach().clone() for p in vae.parameters()],
        "modes": [part.training for part in vae.modules()],
        "tiling": {name: value for name, value in vars(vae).items() if name.startswith(("tile_", "use_"))},
    }


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("tiled", [False, True])
def test_a_decode_leaves_the_vae_as_it_was(vae: Any, latents: torch.Tensor, dtype: torch.dtype, tiled: bool) -> None:
    before = state_of(vae.to(dtype))
    expected = decode_latents(vae, latents, tiled=tiled)
    after = state_of(vae)
    assert all(map(torch.equal, before.pop("values"), after.pop("values"))) and after == before
    # What `torch.compile(vae.decode)` gives is bound to the VAE that it was made of, as this is: a copy has its own.
    vae.decode = partial(type(vae).decode, vae)
    assert np.array_equal(decode_latents(vae, latents, tiled=tiled), expected)
    assert isinstance(vae.decode, partial)


def short(*_: Any, **__: Any) -> None:
    raise RuntimeError("CUDA out of memory. Simulated")


def test_whole_where_it_fits_and_in_tiles_where_it_does_not(
    vae: Any, latents: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole, in_tiles = (decode_latents(vae, latents, tiled=tiled) for tiled in (False, True))
    images, tiled = decode_fitting(vae, latents)
    assert not tiled and np.array_equal(images, whole)
    vae.enable_tiling()
    images, tiled = decode_fitting(vae, latents)
    assert tiled and not np.array_equal(images, whole)
    vae.disable_tiling()
    with pytest.raises(RuntimeError, match="channels"):  # not taken for a shortage
        decode_fitting(vae, latents[:, :3])
    decode = type(vae).decode
    monkeypatch.setattr(type(vae), "decode", lambda vae, *a, **kw: decode(vae, *a, **kw) if vae.use_tiling else short())
    caplog.set_level("INFO", "latentcache")
    images, tiled = decode_fitting(vae, latents)
    assert tiled and np.array_equal(images, in_tiles)
    assert "out of memory on cpu (CUDA out of memory. Simulated): decoding in tiles" in caplog.text
    monkeypatch.setattr(type(vae), "decode", short)
    with pytest.raises(EncodeError, match=r"tiles do not fit .* on the CPU") as caught:
        decode_fitting(vae, latents)
    assert caught.value.problem == "out-of-memory"


def test_numbers_that_are_not_finite_become_black(
    vae: Any, latents: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    assert not decode_latents(vae, latents * torch.nan).any()
    assert "18432 of 18432 decoded values are not finite" in caplog.text


def test_a_vae_of_video_decodes_in_tiles_and_its_settings_come_back() -> None:
    vae = tiny_encoders("wan")["vae"]
    latents = torch.randn(1, 16, 1, 8, 12, generator=torch.Generator().manual_seed(0))
    whole, was_tiled = decode_fitting(vae, latents)
    assert not was_tiled and whole.shape == (1, 1, 64, 96, 3)
    before = state_of(vae)["tiling"]
    assert decode_latents(vae, latents, tiled=True).shape == whole.shape
    assert state_of(vae)["tiling"] == before
    vae.enable_tiling()
    assert decode_fitting(vae, latents)[0].shape == whole.shape
