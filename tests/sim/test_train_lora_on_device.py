"""The example of a training script on a second device: what validation needs is there for its time alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runner_runs import precache_training_set, validation_config

from latentcache.config import Config


def test_only_the_unet_is_on_the_device_while_it_trains(
    device: torch.device,
    make_config: Callable[..., Config],
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: Any,
) -> None:
    """The training set is cached, and the validation set is not."""
    config = validation_config(make_config, photos, num_timesteps=1)
    precache_training_set(config)
    places: list[frozenset[str]] = []

    class Watched(script.Training):
        def step(self, batch: dict) -> float:
            places.append(self.phases.on_device())
            loss = super().step(batch)
            places.append(self.phases.on_device())
            return loss

    monkeypatch.setattr(script, "Training", Watched)
    options = script.Options(
        steps=2, rank=2, batch_size=2, validate_every=1, out=tmp_path / "run", device=str(device), mixed_precision="no"
    )
    result = script.train(config, options)
    assert places == [{"unet"}] * 4
    assert result["on_device"] == ["unet"] and result["device"] == str(device)
    assert [found["num_filled"] > 0 for found in result["validations"]] == [True, False]
    for found in result["validations"]:
        assert found["placement"] == {"validate": ["unet"], "sample": ["unet"]}
        assert len(found["images"]) == 1
