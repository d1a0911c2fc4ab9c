"""The validation loss on a second device: the CPU's numbers, for targets of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.loss_cases import SCHEDULER, make_cache
from helpers.phase_training import small_unet

from latentcache import LatentCache
from latentcache.config import ValidationConfig
from latentcache.validation.loss import validation_loss

SETTINGS = ValidationConfig(num_timesteps=1, batch_size=4)
# Other kernels, other rounding: simulated, the device's are the CPU's; a GPU may use TF32 in convolutions.
TOLERANCE = {"sim": 1e-5, "cuda": 3e-3}


def test_the_device_gives_the_cpus_losses(tmp_path: Path, device: torch.device) -> None:
    make_cache(tmp_path)
    unet = small_unet().eval()
    with LatentCache(tmp_path / "cache", read_only=True) as cache:
        for prediction_type in ("epsilon", "v_prediction", "sample", "flow_prediction"):
            scheduler = {**SCHEDULER.config, "prediction_type": prediction_type}
            cpu, other = (
                validation_loss(unet.to(where), cache, scheduler=scheduler, settings=SETTINGS)
                for where in ("cpu", device)
            )
            assert other.measurement_settings == cpu.measurement_settings
            assert other.by_sample.keys() == cpu.by_sample.keys()
            for name, losses in cpu.by_sample.items():
                assert other.by_sample[name] == pytest.approx(losses, rel=TOLERANCE[device.type])
