"""Latents -> images: the pipeline's own bits, and a VAE that is left as it was."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_models import tiny_encoders, tiny_pipeline

from latentcache.errors import EncodeError
from latentcache.models.vae import decode_fitting, decode_latents

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16


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


def pipeline_images(vae: Any, latents: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
    """What the pipeline decodes, one step after these latents, and the images that it makes of it."""
    pipeline = tiny_pipeline(
        {"vae": vae, **dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))}
    )
    pipeline.unet.to(latents.dtype)
    embeds = {"prompt_embeds": torch.zeros(1, 77, 72), "pooled_prompt_embeds": torch.zeros(1, 40)}
    given = {name: tensor.to(latents.dtype) for name, tensor in embeds.items()} | {"height": 64, "width": 96}
    run = partial(pipeline, **given, num_inference_steps=1, guidance_scale=1.0)
    return run(latents=latents, output_type="latent").images, np.stack(run(latents=latents).images)


@pytest.mark.filterwarnings("ignore:.*upcast_vae:FutureWarning")
@pytest.mark.parametrize(("vae_dtype", "latents_dtype"), [(F32, F32), (F16, F16), (F16, F32), (BF16, BF16)])
def test_the_bits_are_the_pipelines(
    vae: Any, latents: torch.Tensor, vae_dtype: torch.dtype, latents_dtype: torch.dtype
) -> None:
    final, expected = pipeline_images(copy.deepcopy(vae.to(vae_dtype)), latents.to(latents_dtype))
    images = decode_latents(vae, final)
    assert images.dtype == np.uint8 and images.shape == (1, 64, 96, 3) and images.std() > 1
    assert np.array_equal(images, expected)
    vae.register_to_config(latents_mean=[0.1, 0.2, 0.3, 0.4], latents_std=[1.0, 2.0, 3.0, 4.0])
    final, expected = pipeline_images(copy.deepcopy(vae), latents.to(latents_dtype))
    by_statistics = decode_latents(vae, final)
    assert np.array_equal(by_statistics, expected) and not np.array_equal(by_statistics, images)


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
