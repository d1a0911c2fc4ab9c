"""Runs with a validation in the middle, compared with the same run without it: for the CPU and for a second device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.phase_disturbances import FLAGS, differences, state_of
from helpers.phase_training import VARIANTS, Training
from helpers.training_run import assert_same_bits


def predict(training: Training) -> torch.Tensor:
    """A forward of everything that is trained, as a validation does it."""
    latents = training.latents.to(training.device)
    output = training.predict(latents, latents, torch.tensor([5, 600], device=training.device))
    assert not output.requires_grad and output.isfinite().all()
    return output


def fill(training: Training) -> None:
    """A cold cache, filled as OneTrainer did it (#459): everything away, one encoder in, everything in eval mode."""
    for module in training.modules().values():
        module.to("cpu")
    training.parts["vae"].to(training.device)
    training.parts["vae"].encode(torch.zeros(1, 3, 64, 64, device=training.device)).latent_dist.sample()
    for module in training.modules().values():
        module.eval()


def warm(training: Training) -> None:
    with training.phases.enter("validate") as phases:
        predict(training)
        with phases.lend("vae"):
            training.parts["vae"].decode(training.latents.to(training.device))


def cold(training: Training) -> None:
    """OneTrainer #459: the fill parks what is trained; placement is declared again after it."""
    with training.phases.enter("validate") as phases:
        fill(training)
        phases.place()
        predict(training)


def raising(training: Training) -> None:
    with pytest.raises(ZeroDivisionError), training.phases.enter("validate"):
        fill(training)
        predict_nothing = 1 // 0
        assert predict_nothing


def interrupted(training: Training) -> None:
    with pytest.raises(KeyboardInterrupt), training.phases.enter("sample"), training.phases.lend("vae"):
        training.unet.train()
        raise KeyboardInterrupt


def nested(training: Training) -> None:
    with training.phases.enter("validate"):
        before = predict(training)
        with training.phases.enter("sample"), training.phases.lend("vae", "text_encoder_2"):
            fill(training)
            with training.phases.enter("train"):
                assert training.unet.training
        assert torch.equal(predict(training), before)
        with pytest.raises(ZeroDivisionError), training.phases.lend("vae"):
            _ = 1 // 0
        assert torch.equal(predict(training), before)


def from_a_function(training: Training) -> None:
    def validate() -> torch.Tensor:
        with training.phases.enter("validate"):
            return predict(training)

    validate()


def with_gradients_waiting(training: Training) -> None:
    """In the middle of gradient accumulation."""
    for group in training.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.add_(0.25)
    before = [p.grad.clone() for g in training.optimizer.param_groups for p in g["params"]]
    warm(training)
    after = [p.grad for g in training.optimizer.param_groups for p in g["params"]]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    training.optimizer.zero_grad(set_to_none=False)


SCENARIOS = (warm, cold, raising, interrupted, nested, from_a_function, with_gradients_waiting)
CASES = [*(("plain", scenario) for scenario in SCENARIOS), *((variant, cold) for variant in VARIANTS[1:])]


def name_of(value: Any) -> str:
    """The id of a case."""
    return value if isinstance(value, str) else value.__name__


@functools.cache
def _without(device: torch.device, variant: str) -> tuple[list[float], list[torch.Tensor], list[Any]]:
    training = Training(device, variant).run()
    return training.losses, training.tensors(), training.draws


def assert_as_without(scenario: Callable[[Training], None], device: torch.device, variant: str) -> None:
    """A run with the scenario in the middle gives the losses, weights, states and draws of one without it."""
    losses, tensors, draws = _without(device, variant)
    training = Training(device, variant).run(scenario)
    assert training.losses == losses
    assert_same_bits(training.tensors(), tensors)
    assert training.draws == draws


def leave_no_trace(device: torch.device, variant: str, disturbances: Sequence[Callable[[Training], None]]) -> None:
    """Disturb a run inside a phase, under a surrounding autocast; afterwards all is as it was."""
    training = Training(device, variant)
    for _ in range(3):
        training.step()
    defaults = {name: read() for name, (read, _, _) in FLAGS.items()}
    try:
        with torch.autocast(device.type, torch.bfloat16):
            before = state_of(training)
            with training.phases.enter("validate"):
                predict(training)
                for disturb in disturbances:
                    disturb(training)
            changed = differences(before, state_of(training))
            assert changed == [], changed
            # A cast that autocast kept from the phase would have no gradient.
            latents = training.latents.to(device)
            output = training.predict(latents, latents, torch.tensor([5, 600], device=device))
            weight = next(p for p in training.unet.parameters() if p.requires_grad)
            (gradient,) = torch.autograd.grad(output.float().sum(), weight, allow_unused=True)
            assert gradient is not None
    finally:
        for name, (_, put, _) in FLAGS.items():
            put(defaults[name])
        torch.clear_autocast_cache()
