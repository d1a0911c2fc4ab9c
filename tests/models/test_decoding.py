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

SIZE = {"height": 64, "width": 96}


@pytest.fixture
def vae(parts: dict) -> torch.nn.Module:
    return copy.deepcopy(parts["vae"])


@pytest.fixture
def latents() -> torch.Tensor:
    return torch.randn(1, 4, 8, 12, generator=torch.Generator().manual_seed(0))


def state_of(vae: torch.nn.Module) -> dict[str, Any]:
    """Everything that a decode must leave alone."""
    return {
        "tensors": [(id(p), p.dtype, p.device, p.data_ptr()) for p in vae.parameters()],
        "values": [p.detach().clone() for p in vae.parameters()],
        "modes": [part.training for part in vae.modules()],
        "tiling": (vae.use_tiling, vae.use_slicing, vae.tile_latent_min_size, vae.tile_sample_min_size),
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("tiled", [False, True])
def test_a_decode_leaves_the_vae_as_it_was(
    vae: torch.nn.Module, latents: torch.Tensor, dtype: torch.dtype, tiled: bool
) -> None:
    before = state_of(vae.to(dtype))
    decode_latents(vae, latents, tiled=tiled)
    after = state_of(vae)
    assert all(map(torch.equal, before.pop("values"), after.pop("values"))) and after == before


def test_a_compiled_decode_does_not_keep_the_vae_from_tiles_or_float32(
    vae: torch.nn.Module, latents: torch.Tensor
) -> None:
    """What `torch.compile(vae.decode)` gives is bound to the VAE that it was made of, as this is."""
    for tiled in (False, True):
        for dtype in (torch.float32, torch.float16):
            expected = decode_latents(vae.to(dtype), latents, tiled=tiled)
            vae.decode = partial(type(vae).decode, vae)
            assert np.array_equal(decode_latents(vae, latents, tiled=tiled), expected)
            assert isinstance(vae.decode, partial)
            del vae.decode


def pipeline_images(vae: torch.nn.Module, latents: torch.Tensor) -> np.ndarray:
    """What the pipeline makes of these latents: it starts at them, and a scheduler that does nothing keeps them."""

    class Still:
        """No step, so that the pipeline's second half is left alone with the latents."""

        order, init_noise_sigma, timesteps = 1, 1.0, torch.tensor([1])

        def set_timesteps(self, num: int, device: torch.device) -> None: ...

        def scale_model_input(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
            return sample

        def step(self, predicted: torch.Tensor, timestep: torch.Tensor, sample: torch.Tensor, return_dict: bool) -> Any:
            return (sample,)

    pipeline = tiny_pipeline({"vae": vae, **dict.fromkeys(("text_encoder", "text_encoder_2"))} | _tokenizers())
    pipeline.scheduler = Still()
    pipeline.unet.to(latents.dtype)
    embeds = {"prompt_embeds": torch.zeros(1, 77, 72), "pooled_prompt_embeds": torch.zeros(1, 40)}
    images = pipeline(
        **{name: tensor.to(latents.dtype) for name, tensor in embeds.items()},
        latents=latents,
        num_inference_steps=1,
        guidance_scale=1.0,
        **SIZE,
    ).images
    return np.stack([np.asarray(image) for image in images])


def _tokenizers() -> dict[str, Any]:
    return dict.fromkeys(("tokenizer", "tokenizer_2"))


@pytest.mark.filterwarnings("ignore:.*upcast_vae:FutureWarning")
@pytest.mark.parametrize(
    ("vae_dtype", "latents_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_bits_are_the_pipelines(
    vae: torch.nn.Module,
    latents: torch.Tensor,
    vae_dtype: torch.dtype,
    latents_dtype: torch.dtype,
) -> None:
    vae.to(vae_dtype)
    latents = latents.to(latents_dtype)
    images = decode_latents(vae, latents)
    assert images.dtype == np.uint8 and images.shape == (1, 64, 96, 3) and images.std() > 1
    assert np.array_equal(images, pipeline_images(copy.deepcopy(vae), latents))


def test_statistics_of_latents_as_in_the_pipeline(vae: torch.nn.Module, latents: torch.Tensor) -> None:
    plain = decode_latents(vae, latents)
    vae.register_to_config(latents_mean=[0.1, 0.2, 0.3, 0.4], latents_std=[1.0, 2.0, 3.0, 4.0])
    images = decode_latents(vae, latents)
    assert np.array_equal(images, pipeline_images(vae, latents)) and not np.array_equal(images, plain)


def test_whole_where_it_fits(vae: torch.nn.Module, latents: torch.Tensor) -> None:
    images, tiled = decode_fitting(vae, latents)
    assert not tiled and np.array_equal(images, decode_latents(vae, latents))
    vae.enable_tiling()
    tiles, tiled = decode_fitting(vae, latents)
    assert tiled and not np.array_equal(tiles, images)
    vae.disable_tiling()


def test_tiles_after_running_out_of_memory(
    vae: torch.nn.Module,
    latents: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = decode_latents(vae, latents, tiled=True)
    decode = type(vae).decode

    def decoding(self: Any, *args: Any, **kwargs: Any) -> Any:
        return decode(self, *args, **kwargs) if self.use_tiling else _short()

    monkeypatch.setattr(type(vae), "decode", decoding)
    caplog.set_level("INFO", "latentcache")
    images, tiled = decode_fitting(vae, latents)
    assert tiled and np.array_equal(images, expected)
    assert "at once it ran out of memory on cpu (CUDA out of memory. Simulated)" in caplog.text


def _short() -> None:
    raise RuntimeError("CUDA out of memory. Simulated")


def test_tiles_that_do_not_fit_either(
    vae: torch.nn.Module, latents: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(vae), "decode", lambda *_, **__: _short())
    with pytest.raises(EncodeError, match=r"tiles do not fit .* on the CPU") as caught:
        decode_fitting(vae, latents)
    assert caught.value.problem == "out-of-memory"


def test_other_errors_are_not_taken_for_a_shortage(vae: torch.nn.Module, latents: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="channels"):
        decode_fitting(vae, latents[:, :3])


def test_numbers_that_are_not_finite_become_black(
    vae: torch.nn.Module, latents: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    images = decode_latents(vae, latents * torch.nan)
    assert not images.any()
    assert "18432 of 18432 decoded numbers are NaN" in caplog.text


def test_a_vae_of_video_decodes_in_tiles_and_its_settings_come_back() -> None:
    vae = tiny_encoders("wan")["vae"]
    latents = torch.randn(1, 16, 1, 8, 12, generator=torch.Generator().manual_seed(0))
    whole, was_tiled = decode_fitting(vae, latents)
    assert not was_tiled and whole.shape == (1, 1, 64, 96, 3)
    before = dict(vars(vae))
    assert decode_latents(vae, latents, tiled=True).shape == whole.shape
    assert {name: vars(vae)[name] for name in before if name.startswith(("tile_", "use_"))} == {
        name: value for name, value in before.items() if name.startswith(("tile_", "use_"))
    }
    vae.enable_tiling()
    assert decode_fitting(vae, latents)[0].shape == whole.shape
