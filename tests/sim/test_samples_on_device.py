"""Sampling on a second device from cached embeddings: the parked parts come in turn, and are parked again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.encoding import generate
from helpers.tiny_models import tiny_pipeline

from latentcache import LatentCache
from latentcache.config import Config, ValidationConfig
from latentcache.devices.audit import audit
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_denoiser, tiny_parts
from latentcache.precache.prompts import cache_prompts
from latentcache.precache.workspace import open_workspace
from latentcache.validation.sample_images import prompt_embeddings

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
