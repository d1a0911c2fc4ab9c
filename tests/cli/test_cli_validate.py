"""`latentcache validate`: a checkpoint, a cache, a loss and images; no trainer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.runner_runs import validation_config

from latentcache.checkpoints.checkpoint import save_checkpoint
from latentcache.config import Config
from latentcache.models.tiny import tiny_denoiser
from latentcache.precache.run import run_precache

RunJson = Callable[..., tuple[int, Any]]


@pytest.fixture
def config_file(make_config: Callable[..., Config], photos: Path, tmp_path: Path) -> Path:
    config = validation_config(make_config, photos)
    run_precache(config)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    return path


def test_two_checkpoints_are_compared_sample_by_sample(config_file: Path, run_json: RunJson, tmp_path: Path) -> None:
    """The model's own UNet, and another in a checkpoint."""
    other = tiny_denoiser()
    with torch.no_grad():
        other.conv_out.weight.mul_(0.5)
        other.conv_out.bias.mul_(0.5)
    checkpoint = save_checkpoint(tmp_path / "run", model=other, step=30, rng=False)
    code, first = run_json("validate", config_file)
    assert code == 0 and first["num_samples"] == 5 and len(first["loss_by_timestep"]) == 2
    assert first["difference"] is None and [Path(image["path"]).is_file() for image in first["images"]] == [True]
    metrics = tmp_path / "validation/000000/metrics.json"
    assert json.loads(metrics.read_text())["loss"] == first["loss"]
    code, second = run_json("validate", config_file, "--unet", checkpoint, "--against", metrics)
    assert code == 0 and second["step"] == 30
    assert second["difference"]["mean"] == pytest.approx(second["loss"] - first["loss"], rel=1e-6)
    assert second["difference"]["num"] == 5
    assert (tmp_path / "validation/000030/loss.png").is_file()


def test_bad_input_is_named(config_file: Path, run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    for *arguments, message in (
        ("--unet", "nowhere", "no file or folder nowhere"),
        ("--dtype", "float8", "--dtype is 'float8'"),
        ("--validation.scheduler", "EulerScheduler", "did you mean"),
        ("--cache.store", "cpu", "cache.store is cpu"),
    ):
        code, _, error = run("validate", config_file, *arguments)
        assert code == 2 and message in error, (arguments, error)
    assert not (tmp_path / "validation").exists()
