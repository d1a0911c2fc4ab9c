"""The validation loss on a second device: the CPU's numbers, nothing moved, and one wait for the device per batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.loss_cases import SCHEDULER, make_cache
from torch.utils._python_dispatch import TorchDispatchMode

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


class CountReads(TorchDispatchMode):
    """Counts what the host reads from the device: values, and copies to the CPU."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [arg for arg in args if isinstance(arg, torch.Tensor)]
        on_host = isinstance(result, bool | int | float) or (
            isinstance(result, torch.Tensor) and result.device.type == "cpu"
        )
        self.num += on_host and any(tensor.device.type != "cpu" for tensor in given)
        return result


def test_the_host_waits_once_a_batch(cache: LatentCache, device: torch.device) -> None:
    class Still(torch.nn.Module):
        """Waits for nothing itself."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1, device=device))
            self.num_calls = 0

        def forward(self, sample: torch.Tensor, timestep: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
            assert {sample.device, timestep.device} == {device}
            self.num_calls += 1
            return (sample * self.weight,)

    unet = Still()
    with CountReads() as reads:
        report = validation_loss(unet, cache, scheduler=SCHEDULER, settings=SETTINGS)
    assert report.loss.num == 7
    assert reads.num == unet.num_calls
