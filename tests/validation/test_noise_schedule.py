"""The noise schedule of training equals that of diffusers' schedulers, for any sampler with the same betas."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)

from latentcache.errors import ConfigError
from latentcache.families.base import TimestepSampling
from latentcache.validation.noise_schedule import NoiseSchedule

SDXL = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
INDEX = torch.tensor([0, 1, 499, 998, 999])
LATENTS, NOISE = (torch.randn(5, 4, 3, 2, generator=torch.Generator().manual_seed(seed)) for seed in range(2))


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("zero_snr", [False, True], ids=["plain", "zero-terminal-snr"])
@pytest.mark.parametrize("sampler", [EulerDiscreteScheduler, DDIMScheduler, DDPMScheduler])
def test_betas_are_those_of_ddpm_for_any_sampler(sampler: Any, zero_snr: bool, prediction_type: str) -> None:
    settings = {**SDXL, "prediction_type": prediction_type, "rescale_betas_zero_snr": zero_snr}
    scheduler, ddpm = sampler(**settings), DDPMScheduler(**settings)
    scheduler.set_timesteps(7)  # for sampling; training has its own
    schedule = NoiseSchedule.of(scheduler)
    assert schedule.num_train_timesteps == 1000 and schedule.prediction_type == prediction_type
    assert schedule.timesteps[INDEX].equal(INDEX)
    assert schedule.noised(LATENTS, NOISE, INDEX).equal(ddpm.add_noise(LATENTS, NOISE, INDEX))
    target = {"epsilon": NOISE, "v_prediction": ddpm.get_velocity(LATENTS, NOISE, INDEX), "sample": LATENTS}
    assert schedule.target(LATENTS, NOISE, INDEX).equal(target[prediction_type])


def test_flow_is_that_of_diffusers() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    schedule = NoiseSchedule.of(scheduler)
    timesteps = schedule.timesteps[INDEX]
    assert timesteps.equal(scheduler.timesteps.flip(0)[INDEX]) and timesteps.dtype == torch.float32
    expected = scheduler.scale_noise(LATENTS, timesteps, NOISE)
    torch.testing.assert_close(schedule.noised(LATENTS, NOISE, INDEX), expected, rtol=0, atol=1e-6)
    assert schedule.target(LATENTS, NOISE, INDEX).equal(NOISE - LATENTS)
    assert schedule.noised(LATENTS, NOISE, INDEX)[-1].equal(NOISE[-1]), "the last index is noise alone"


def test_a_scheduler_config_file_is_enough() -> None:
    for scheduler in (EulerDiscreteScheduler(**SDXL), FlowMatchEulerDiscreteScheduler(shift=2.0)):
        config = {**scheduler.config, "_class_name": type(scheduler).__name__}
        assert NoiseSchedule.of(config).digest == NoiseSchedule.of(scheduler).digest
    old = {"_class_name": "PNDMScheduler", "num_train_timesteps": 1000, **SDXL}
    assert NoiseSchedule.of(old).prediction_type == "epsilon", "diffusers' default: old files do not name it"


@pytest.mark.parametrize(("prediction_type", "limit"), [("epsilon", 1.0), ("v_prediction", 0.0), ("sample", 0.0)])
def test_zero_terminal_snr_divides_by_nothing(prediction_type: str, limit: float) -> None:
    schedule = NoiseSchedule.of(DDPMScheduler(**SDXL, rescale_betas_zero_snr=True, prediction_type=prediction_type))
    last = torch.tensor([999])
    assert schedule.snr(last).item() == 0 and schedule.min_snr_weight(last, 5.0).item() == limit
    assert schedule.noised(LATENTS[:1], NOISE[:1], last).equal(NOISE[:1])


def test_the_digest_stands_for_what_counts_and_nothing_else() -> None:
    base: dict[str, Any] = {**SDXL, "prediction_type": "epsilon", "num_train_timesteps": 1000}
    digest = NoiseSchedule.of(base).digest
    for same in (EulerDiscreteScheduler(**base, steps_offset=1), DDPMScheduler(**base, clip_sample=False)):
        assert NoiseSchedule.of(same).digest == digest
    changes: list[dict[str, Any]] = [
        {"beta_end": 0.02},
        {"trained_betas": torch.linspace(0.001, 0.02, 50).tolist()},
        {"prediction_type": "v_prediction"},
        {"rescale_betas_zero_snr": True},
        {"num_train_timesteps": 500},
        {"prediction_type": "flow_prediction"},
        {"prediction_type": "flow_prediction", "flow_shift": 2.0},
        {"prediction_type": "flow_prediction", "num_train_timesteps": 500},
    ]
    digests = [NoiseSchedule.of({**base, **change}).digest for change in changes]
    assert len({digest, *digests}) == len(changes) + 1


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ({**SDXL, "prediction_type": "x0"}, "prediction_type is 'x0'; it must be one of epsilon, v_pred"),
        (EDMEulerScheduler(), "EDMEulerScheduler: its config has no beta_schedule, beta_start, beta_end"),
        ({**SDXL, "beta_end": "high"}, "its config cannot be used: could not convert"),
        ({**SDXL, "trained_betas": [0.1, 1.5, 0.1]}, r"not finite; betas must lie in \[0, 1\]"),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 0.0}, "not finite.*a shift above 0"),
        (FlowMatchEulerDiscreteScheduler(invert_sigmas=True), "invert_sigmas is true"),
        (None, "scheduler is a NoneType"),
    ],
)
def test_a_scheduler_that_no_training_has_is_refused(scheduler: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NoiseSchedule.of(scheduler)


@pytest.mark.parametrize(("shift", "deviation"), [(2.0, 1.5), (1.0, 0.5)])
def test_a_shift_is_the_mean_of_the_normal_number(shift: float, deviation: float) -> None:
    """diffusers' script for Ideogram 4 draws `sigmoid(normal(log(shift), deviation))`."""
    schedule = NoiseSchedule.of(FlowMatchEulerDiscreteScheduler())
    sampling = TimestepSampling("logit_normal", shift=shift, deviation=deviation)
    index = schedule.draw(sampling, 500, torch.Generator().manual_seed(4))
    normal = torch.randn(500, generator=torch.Generator().manual_seed(4))
    expected = (math.log(shift) + deviation * normal).sigmoid()
    torch.testing.assert_close(schedule.noise_scale[index], expected, rtol=0, atol=1.1e-3)


def test_a_part_of_the_schedule_is_drawn_from_alone() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    whole = NoiseSchedule.of(scheduler)
    low, high = NoiseSchedule.of(scheduler, (0.0, 0.875)), NoiseSchedule.of(scheduler, (0.875, 1.0))
    assert [*low.used, *high.used] == list(whole.used) == list(range(1000))
    assert whole.timesteps[low.used[-1]] < 875 <= whole.timesteps[high.used[0]]
    assert len({whole.digest, low.digest, high.digest}) == 3
    assert NoiseSchedule.of(low) is low
    for part in (whole, low, high):
        for density, shift in itertools.product(("uniform", "logit_normal"), (None, 3.0)):
            drawn = part.draw(TimestepSampling(density, shift), 4000, torch.Generator().manual_seed(1))
            assert set(drawn.tolist()) <= set(part.used)
            # The whole part, not only its middle.
            inner = [part.used[len(part.used) * tenth // 10] for tenth in (2, 8)]
            assert drawn.min() < inner[0] and drawn.max() > inner[1]
