"""Latents -> images: a VAE that is left as it was. The bits: see tests/validation/test_sample_images.py."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_models import tiny_encoders

from latentcache.errors import EncodeError
from latentcache.models.vae import decode_fitting, decode_latents

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
    assert "at once it ran out of memory on cpu (CUDA out of memory. Simulated)" in caplog.text
    monkeypatch.setattr(type(vae), "decode", short)
    with pytest.raises(EncodeError, match=r"tiles do not fit .* on the CPU") as caught:
        decode_fitting(vae, latents)
    assert caught.value.problem == "out-of-memory"


def test_numbers_that_are_not_finite_become_black(
    vae: Any, latents: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    assert not decode_latents(vae, latents * torch.nan).any()
    assert "18432 of 18432 decoded numbers are NaN" in caplog.text


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
