"""Sampling on a second device from cached embeddings: the parked parts come in turn, and are parked again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.encoding import generate

from latentcache import LatentCache
from latentcache.config import Config, ValidationConfig
from latentcache.devices.audit import audit
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_denoiser, tiny_parts, tiny_pipeline
from latentcache.precache.prompts import cache_prompts
from latentcache.precache.workspace import open_workspace
from latentcache.validation.sample_images import PromptEmbeddings, prompt_embeddings

CPU = torch.device("cpu")
PROMPTS = ["a validation prompt", "a late idea"]
"""The first is cached, the second is not."""
SETTINGS = ValidationConfig(height=64, width=96, num_inference_steps=2, seed=5)
TEXT_PARTS = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")


@pytest.fixture
def parts() -> dict[str, Any]:
    return tiny_parts()


@pytest.fixture
def sampled(config: Config, parts: dict[str, Any]) -> Iterator[Callable[[torch.device], list[np.ndarray]]]:
    """The whole path with the UNet on a device and everything else parked on the CPU."""
    models = LoadedModels(**{name: parts[name] for name in TEXT_PARTS})
    seen: dict[str, set[torch.device]] = {name: set() for name in ("text_encoder", "text_encoder_2", "vae")}
    for name, devices in seen.items():
        part = parts[name].decoder if name == "vae" else parts[name]
        part.register_forward_pre_hook(lambda module, _, to=devices: to.add(next(module.parameters()).device))

    def run(device: torch.device) -> list[np.ndarray]:
        unet = tiny_denoiser().to(device)
        before = {name: [(id(p), p.dtype) for p in parts[name].parameters()] for name in seen}

        def encode(pairs: list[tuple[str, bool]]) -> int:
            with open_workspace(config.cache) as workspace:
                return cache_prompts(config, workspace, models, pairs, device=unet)

        with LatentCache(config.cache.path) as cache:
            embeddings = prompt_embeddings(cache, PROMPTS, "ugly", device=unet, encode=encode)
        samples = generate(unet, parts["vae"], tiny_pipeline().scheduler, embeddings, SETTINGS)
        assert seen == {name: {device} for name in seen}
        assert before == {name: [(id(p), p.dtype) for p in parts[name].parameters()] for name in seen}
        modules = {name: parts[name] for name in seen}
        audit(modules | {"unet": unet}, device=dict.fromkeys(seen, CPU) | {"unet": device}).raise_for_errors()
        return [np.asarray(sample.image) for sample in samples]

    yield run


def test_the_whole_path_on_a_device_gives_the_images_of_the_cpu(
    config: Config, sampled: Callable[[torch.device], list[np.ndarray]], device: torch.device, parts: dict[str, Any]
) -> None:
    images = sampled(device)
    with LatentCache(config.cache.path) as cache:
        embeddings = prompt_embeddings(cache, PROMPTS, "ugly", device="cpu")
    expected = generate(tiny_denoiser(), tiny_parts()["vae"], tiny_pipeline().scheduler, embeddings, SETTINGS)
    assert len(images) == 2
    for image, sample in zip(images, expected, strict=True):
        other = np.asarray(sample.image)
        assert other.std() > 1 and np.abs(image.astype(int) - other).max() <= 2


def made_up(device: torch.device) -> list[PromptEmbeddings]:
    shapes = {"prompt_embeds": (1, 77, 72), "pooled_prompt_embeds": (1, 40)}
    both = ({name: torch.ones(shape, device=device) for name, shape in shapes.items()} for _ in range(2))
    return [PromptEmbeddings("made up", "", *both)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_half_precision_vae_is_upcast_and_put_back(
    device: torch.device, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    vae = parts["vae"].half()
    before = [(id(p), p.dtype, p.device, p.detach().clone()) for p in vae.parameters()]
    unet = tiny_denoiser().half().to(device)
    (made,) = made_up(device)
    half = {name: tensor.half() for name, tensor in made.embeds.items()}
    embeddings = [replace(made, embeds=half, negative=half)]
    seen = []
    decode = vae.decode

    def watched(latents: torch.Tensor, **kwargs: Any) -> Any:
        seen.append((latents.dtype, latents.device, vae.dtype, vae.device))
        if fails:
            raise KeyboardInterrupt
        return decode(latents, **kwargs)

    monkeypatch.setattr(vae, "decode", watched)
    if fails:
        with pytest.raises(KeyboardInterrupt):
            generate(unet, vae, tiny_pipeline().scheduler, embeddings, SETTINGS)
    else:
        assert generate(unet, vae, tiny_pipeline().scheduler, embeddings, SETTINGS)[0].image.size == (96, 64)
    assert seen == [(torch.float32, device, torch.float32, device)]
    for (number, dtype, device_before, values), parameter in zip(before, vae.parameters(), strict=True):
        assert (number, dtype, device_before) == (id(parameter), parameter.dtype, parameter.device)
        assert torch.equal(values, parameter)
