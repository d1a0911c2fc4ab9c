"""The example of a training script on a second device: what validation needs is there for its time alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.photo_files import write_photo

from latentcache.config import Config
from latentcache.precache.run import run_precache


def cold_config(make_config: Callable[..., Config], tmp_path: Path, encode_device: str) -> Config:
    """A config of which the training set is cached, and the validation set is not."""
    write_photo(tmp_path / "held-out" / "f.png", 5, (80, 144)).with_suffix(".txt").write_text("a bridge\n")
    held_out = {"name": "held-out", "role": "validation", "source": {"path": tmp_path / "held-out"}}
    validation = {"path": tmp_path / "validation", "prompts": ["a tree"], "num_inference_steps": 2, "num_timesteps": 2}
    config = make_config(**{"validation": validation | {"height": 64, "width": 64}, "encode.device": encode_device})
    held_out |= config.datasets[0].model_dump(include={"buckets", "images"})
    whole = Config.model_validate(config.model_dump() | {"datasets": [*config.model_dump()["datasets"], held_out]})
    run_precache(config)
    return whole


def test_only_the_unet_is_on_the_device_while_it_trains(
    device: torch.device,
    make_config: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: Any,
) -> None:
    whole = cold_config(make_config, tmp_path, "auto")
    places: list[frozenset[str]] = []

    class Watched(script.Training):
        def step(self, batch: dict) -> float:
            places.append(self.phases.on_device())
            loss = super().step(batch)
            places.append(self.phases.on_device())
            return loss

    monkeypatch.setattr(script, "Training", Watched)
    options = script.Options(
        steps=3, rank=2, batch_size=2, validate_every=1, out=tmp_path / "run", device=str(device), mixed_precision="no"
    )
    result = script.train(whole, options)
    assert places == [{"unet"}] * 6
    assert result["on_device"] == ["unet"]
    assert [found["num_filled"] > 0 for found in result["validations"]] == [True, False, False]
    for found in result["validations"]:
        assert found["placement"] == {"validate": ["unet"], "sample": ["unet"]}
        assert len(found["images"]) == 1
    assert result["device"] == str(device)
