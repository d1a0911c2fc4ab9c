"""The phase switch on the CPU: training goes on as if nothing had happened. tests/sim does it on a second device."""

from __future__ import annotations

import pytest
import torch
from diffusers.training_utils import EMAModel
from helpers.phase_runs import SCENARIOS, Scenario, assert_as_without, in_inference_mode, leave_no_trace, name_of
from helpers.phase_training import VARIANTS, Training

from latentcache.errors import PhaseError
from latentcache.phases.phases import Phases
from latentcache.phases.state import ComputeModes, RandomStreams, Snapshot, TrainingModes
from latentcache.phases.weights import EmaWeights, Gradients, ScheduleFreeMode, Weights

CPU = torch.device("cpu")


@pytest.mark.parametrize("scenario", [*SCENARIOS, in_inference_mode], ids=name_of)
def test_training_goes_on_bit_by_bit(scenario: Scenario) -> None:
    """The variants of training are those of tests/sim, and of a validation by the runner."""
    assert_as_without(scenario, CPU, "plain")


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_disturbances_at_once_are_put_back(variant: str) -> None:
    leave_no_trace(CPU, variant)


@pytest.mark.parametrize(
    ("snapshot", "variant"),
    [
        *((each, "plain") for each in (TrainingModes, RandomStreams, ComputeModes, Weights, Gradients)),
        (EmaWeights, "ema"),
        (ScheduleFreeMode, "schedule-free"),
    ],
)
def test_each_snapshot_is_needed(snapshot: type[Snapshot], variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no snapshot is restored by another one, and the disturbances show that each works."""
    monkeypatch.setattr(snapshot, "restore", lambda self: None)
    with pytest.raises((PhaseError, AssertionError, RuntimeError)):
        leave_no_trace(CPU, variant)


def test_averages_come_in_once_and_out_where_they_came_in() -> None:
    training = Training(CPU, "ema").run()
    ema, weight = training.ema, training.unet.conv_in.weight
    trained, parameters = weight.detach().clone(), list(training.unet.parameters())
    ema.store(parameters)
    ema.copy_to(parameters)
    average = weight.detach().clone()
    assert not torch.equal(average, trained)
    for are_in in (True, False):  # other code has put them in, and keeps them there
        with training.phases.enter("validate"):
            assert torch.equal(weight, average)
            training.unet.requires_grad_(False)
            with training.phases.enter("sample"):
                assert torch.equal(weight, average)
            assert torch.equal(weight, average), "the inner phase swapped them out"
        assert torch.equal(weight, average if are_in else trained)
        if are_in:
            ema.restore(parameters)
    assert ema.temp_stored_params is None


def test_averages_are_used_inside_an_open_autocast() -> None:
    """It keeps its casts of the trained weights, and would compute with them in the phase."""
    net, inputs = torch.nn.Linear(4, 4), torch.randn(2, 4)
    ema = EMAModel(net.parameters())
    for average in ema.shadow_params:
        average.zero_()
    phases = Phases({"unet": net, "ema": ema}, device="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        trained = net(inputs)
        with phases.enter("validate"):
            assert not net(inputs).any()
        assert torch.equal(net(inputs), trained)
