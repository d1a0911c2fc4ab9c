"""Training runs with a validation in the middle, compared with the same run without it, on any device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.phase_disturbances import compute_modes, differences, disturb, set_compute_modes, state_of
from helpers.phase_training import Training
from helpers.training_run import assert_same_bits

Scenario = Callable[[Any], object]


def forward(training: Training, unet: Any = None) -> torch.Tensor:
    """Output for fixed latents."""
    timesteps = torch.tensor([5, 600], device=training.device)
    return training.predict(training.latents.to(training.device), timesteps, unet)


def predict(training: Training) -> torch.Tensor:
    """A forward of all trained parts, as in a validation."""
    output = forward(training, training.phases.module("unet"))
    assert not output.requires_grad and output.isfinite().all()
    return output


def fill(training: Training) -> None:
    """Fill a cold cache as OneTrainer did (#459): everything away, one encoder in, everything in eval mode."""
    for module in training.modules().values():
        module.to("cpu")
    training.parts["vae"].to(training.device)
    training.parts["vae"].encode(torch.zeros(1, 3, 64, 64, device=training.device)).latent_dist.sample()
    for module in training.modules().values():
        module.eval()


def warm(training: Training) -> None:
    """A validation on a warm cache, in the middle of gradient accumulation."""
    for parameter in training.trained():
        parameter.grad.add_(0.25)
    before = [parameter.grad.clone() for parameter in training.trained()]
    with training.phases.enter("validate") as phases:
        predict(training)
        with phases.lend("vae"):
            training.parts["vae"].decode(training.latents.to(training.device))
    assert all(torch.equal(a.grad, b) for a, b in zip(training.trained(), before, strict=True))
    training.optimizer.zero_grad(set_to_none=False)


def cold(training: Training) -> None:
    """OneTrainer #459: filling the cache parks trained parts, and `place` is called after it."""
    with training.phases.enter("validate") as phases:
        fill(training)
        phases.place()
        predict(training)


def raising(training: Training) -> None:
    raised = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as caught, training.phases.enter("validate"), training.phases.lend("vae"):
        fill(training)
        raise raised
    assert caught.value is raised and caught.value.__context__ is None


def nested(training: Training) -> None:
    with training.phases.enter("validate"):
        before = predict(training)
        with training.phases.enter("sample"), training.phases.lend("vae", "text_encoder_2"):
            fill(training)
            with training.phases.enter("train"):
                assert training.unet.training
        assert torch.equal(predict(training), before)
        with pytest.raises(ZeroDivisionError), training.phases.lend("vae"):
            raise ZeroDivisionError
        assert torch.equal(predict(training), before)


def in_inference_mode(training: Training) -> None:
    """Tensors made in inference mode cannot be trained. The simulated device has no inference mode."""
    with training.phases.enter("validate"), torch.inference_mode():
        predict(training)
        with training.phases.lend("vae"):
            pass
    with torch.inference_mode(), training.phases.enter("validate"):
        fill(training)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


SCENARIOS = (warm, cold, raising, nested)


def each_in_turn(training: Training) -> None:
    for scenario in SCENARIOS:
        scenario(training)


def name_of(value: Any) -> str:
    """The id of a test case."""
    return value if isinstance(value, str) else value.__name__


@functools.cache
def _without(device: torch.device, variant: str, kind: type[Training]) -> tuple[Any, ...]:
    training = kind(device, variant).run()
    return training.losses, training.tensors(), training.draws


def assert_as_without(
    scenario: Scenario, device: torch.device, variant: str, kind: type[Training] = Training
) -> Training:
    """Check that a run with the scenario in the middle has the losses, weights, states and draws of one without."""
    losses, tensors, draws = _without(device, variant, kind)
    training = kind(device, variant).run(scenario)
    assert training.losses == losses
    assert_same_bits(training.tensors(), tensors)
    assert training.draws == draws
    return training


def leave_no_trace(device: torch.device, variant: str) -> None:
    """Check that a run that was disturbed inside a phase, under a surrounding autocast, is restored."""
    training, defaults = Training(device, variant).run(), compute_modes(device)
    try:
        with torch.autocast(device.type, torch.bfloat16):
            before = state_of(training)
            with training.phases.enter("validate"):
                predict(training)
                disturb(training)
            changed = differences(before, state_of(training))
            assert changed == [], changed
            # A weight cast that autocast cached during the phase would have no gradient.
            weight = next(p for p in training.unet.parameters() if p.requires_grad)
            (gradient,) = torch.autograd.grad(forward(training).float().sum(), weight, allow_unused=True)
            assert gradient is not None
    finally:
        set_compute_modes(defaults)
        torch.clear_autocast_cache()
