"""The example of a training script on a second device: what validation needs is there for its time alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers.runner_runs import precache_training_set, validation_config

from latentcache.config import Config


def test_only_the_unet_is_on_the_device_after_training_and_validations(
    device: torch.device, make_config: Callable[..., Config], photos: Path, tmp_path: Path, script: Any
) -> None:
    """The training set is cached, and the validation set is not."""
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
