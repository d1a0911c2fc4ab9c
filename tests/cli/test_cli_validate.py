"""`latentcache validate`: a checkpoint, a cache, a loss and images; no trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runner_runs import validation_config

from latentcache.checkpoints.checkpoint import save_checkpoint
from latentcache.models.tiny import tiny_denoiser
from latentcache.precache.run import run_precache


def test_two_checkpoints_are_compared_sample_by_sample(
    make_config: Any, photos: Path, run: Any, run_json: Any, tmp_path: Path
) -> None:
    """The model's own UNet, and another in a checkpoint; before that, input that is named and leaves nothing."""
    run_precache(config := validation_config(make_config, photos))
    config_file = tmp_path / "config.json"
    config_file.write_text(config.model_dump_json())
    for *arguments, message in (
        ("--unet", "nowhere", "no file or folder nowhere"),
        ("--dtype", "float8", "--dtype is 'float8'"),
        ("--validation.scheduler", "EulerScheduler", "did you mean"),
        ("--cache.store", "cpu", "cache.store is cpu"),
    ):
        code, _, error = run("validate", config_file, *arguments)
        assert code == 2 and message in error, (arguments, error)
    assert not (tmp_path / "validation").exists()
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
