"""The runner and the training script on a second device: encoders come and go, and training is restored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.phase_runs import assert_as_without
from helpers.phase_training import Training
from helpers.runner_runs import precache_training_set, runner_for, validation_config

from latentcache.config import Config
from latentcache.loading.cache import LatentCache
from latentcache.phases.phases import Phases

CPU = torch.device("cpu")
EXACT = {"encode.vae_dtype": "float32", "encode.text_dtype": "float32"}


@pytest.mark.parametrize(("variant", "encode_on"), [("lora", "auto"), ("ema", "cpu")])
def test_training_goes_on_bit_by_bit_cold_and_warm(
    variant: str, encode_on: str, make_config: Callable[..., Config], photos: Path, device: torch.device
) -> None:
    config = validation_config(lambda: make_config(**{"encode.device": encode_on}), photos)
    precache_training_set(config)

    def validate(training: Training) -> None:
        with LatentCache(config.cache.path) as cache:
            runner = runner_for(training, cache, config)
            cold, warm = runner.run(1), runner.run(2)
        assert cold is not None and warm is not None
        assert cold.num_filled > 0 and warm.num_filled == 0
        assert cold.placement == warm.placement == {"validate": ("unet",), "sample": ("unet",)}
        assert cold.loss == warm.loss
        assert training.phases.on_device() == {"unet"}

    assert_as_without(validate, device, variant)


class Swapped(Training):
    """Some blocks of the UNet wait on the CPU and come for their forward, as in trainers for small cards."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.unet.requires_grad_(False)
        for block in self.unet.up_blocks:
            block.to(CPU)
            block.register_forward_pre_hook(lambda module, _: (module.to(device), None)[1])
            block.register_forward_hook(lambda module, *_: (module.to(CPU), None)[1])
        self.phases = Phases(self.parts, device=device, immovable=("unet",))
        self.phases.start("train")


def test_the_whole_path_on_a_device_gives_the_loss_and_the_images_of_the_cpu(
    make_config: Callable[..., Config], photos: Path, tmp_path: Path, device: torch.device
) -> None:
    """Encoders, a UNet with swapped blocks and the decoder run there, even for a prompt that is encoded late."""
    reports = []
    for where, kind in ((CPU, Training), (device, Swapped)):
        settings = {"encode.device": str(where), "cache.path": tmp_path / where.type, **EXACT}
        config = validation_config(lambda settings=settings: make_config(**settings), photos)
        precache_training_set(config)
        training = kind(where)
        parts = {name: training.parts[name] for name in ("unet", "text_encoder", "text_encoder_2")}
        places = [parameter.device for parameter in training.unet.parameters()]
        seen: dict[str, set[torch.device]] = {name: set() for name in (*parts, "vae")}
        for name, part in {**parts, "vae": training.parts["vae"].decoder}.items():
            part.register_forward_pre_hook(lambda module, _, to=seen[name]: to.add(next(module.parameters()).device))
        with LatentCache(config.cache.path) as cache:
            reports.append(runner_for(training, cache, config).run(1))
        assert seen == {name: {where} for name in seen}
        assert [parameter.device for parameter in training.unet.parameters()] == places
    expected, found = reports
    assert found.num_filled == expected.num_filled > 0 and found.notes == ("unet is not moved: declared immovable",)
    for name, losses in expected.loss.by_sample.items():
        assert found.loss.by_sample[name] == pytest.approx(losses, rel=3e-3)
    for ours, theirs in zip(found.images, expected.images, strict=True):
        image, other = np.asarray(ours.image).astype(int), np.asarray(theirs.image)
        assert other.std() > 1 and np.abs(image - other).max() <= 2


def test_only_the_unet_is_on_the_device_after_training_and_validations(
    device: torch.device, make_config: Callable[..., Config], photos: Path, tmp_path: Path, script: Any
) -> None:
    """The validation set is not cached at first."""
    config = validation_config(make_config, photos, num_timesteps=1)
    precache_training_set(config)
    options = script.Options(
        steps=2, rank=2, batch_size=2, validate_every=1, out=tmp_path / "run", device=str(device), mixed_precision="no"
    )
    result = script.train(config, options)
    assert result["on_device"] == ["unet"] and result["device"] == str(device)
    assert [found["num_filled"] > 0 for found in result["validations"]] == [True, False]
    for found in result["validations"]:
        assert found["placement"] == {"validate": ["unet"], "sample": ["unet"]}
        assert len(found["images"]) == 1
