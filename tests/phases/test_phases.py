"""The phase switch on the CPU: training goes on as if nothing had happened. tests/sim does it on a second device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.phase_disturbances import DISTURBANCES
from helpers.phase_runs import SCENARIOS, assert_as_without, leave_no_trace, name_of
from helpers.phase_training import VARIANTS, Training

from latentcache.errors import PhaseError
from latentcache.phases.state import ComputeModes, RandomStreams, Snapshot, TrainingModes
from latentcache.phases.weights import EmaWeights, Gradients, ScheduleFreeMode, Weights

CPU = torch.device("cpu")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=name_of)
def test_training_goes_on_bit_by_bit(scenario: Callable[[Training], None]) -> None:
    """The variants of training are those of tests/sim, and of a validation by the runner."""
    assert_as_without(scenario, CPU, "plain")


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_disturbances_at_once_are_put_back(variant: str) -> None:
    leave_no_trace(CPU, variant, DISTURBANCES)


@pytest.mark.parametrize(
    "snapshot", [TrainingModes, RandomStreams, ComputeModes, EmaWeights, ScheduleFreeMode, Weights, Gradients]
)
def test_each_snapshot_is_needed(snapshot: type[Snapshot], monkeypatch: pytest.MonkeyPatch) -> None:
    """So no snapshot is restored by another one, and the disturbances show that each works."""
    monkeypatch.setattr(snapshot, "restore", lambda self: None)
    with pytest.raises((PhaseError, AssertionError, RuntimeError)):
        for variant in ("plain", "ema", "schedule-free"):
            leave_no_trace(CPU, variant, DISTURBANCES)
