"""The validation loss on a second device: the CPU's numbers, nothing moved, and one wait for the device per batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.loss_cases import SCHEDULER, make_cache

from latentcache import LatentCache
from latentcache.config import ValidationConfig
from latentcache.models.tiny import tiny_denoiser
from latentcache.validation.loss import validation_loss
from latentcache.validation.metrics import LossReport

SETTINGS = ValidationConfig(num_timesteps=2, batch_size=4)
# Other kernels, other rounding: simulated, the device's are the CPU's; a GPU may use TF32 in convolutions.
TOLERANCE = {"sim": 1e-5, "cuda": 3e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loss")
    make_cache(folder)
    return folder


@pytest.fixture
def cache(folder: Path) -> Iterator[LatentCache]:
    with LatentCache(folder / "cache", read_only=True) as cache:
        yield cache


def losses(report: LossReport) -> list[float]:
    return [loss for samples in report.by_sample.values() for loss in samples.values()]


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample", "flow_prediction"])
def test_the_device_gives_the_cpus_losses(cache: LatentCache, device: torch.device, prediction_type: str) -> None:
    scheduler = {**SCHEDULER.config, "prediction_type": prediction_type}
    cpu, other = (
        validation_loss(tiny_denoiser(1).eval().to(where), cache, scheduler=scheduler, settings=SETTINGS)
        for where in ("cpu", device)
    )
    assert other.measurement_settings == cpu.measurement_settings
    assert losses(other) == pytest.approx(losses(cpu), rel=TOLERANCE[device.type])
