"""What phases refuse, report and survive: wrong names, failing restores, Ctrl-C at any moment, nested errors."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from helpers.phase_disturbances import differences, state_of
from helpers.phase_training import Training

from latentcache.errors import PhaseError
from latentcache.phases import model_parts, phases
from latentcache.phases.phases import Phase, Phases
from latentcache.phases.state import TrainingModes
from latentcache.phases.weights import Weights
from latentcache.utils import signals

CPU = torch.device("cpu")


def small_parts() -> dict[str, Any]:
    torch.manual_seed(0)
    unet = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
    vae = torch.nn.Linear(2, 2).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=0.1)
    unet(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {"unet": unet, "vae": vae, "optimizer": optimizer, "tokenizer": object()}


@pytest.fixture
def small() -> Phases:
    """A run of a few numbers. The tokenizer is no part that a phase has anything to do with."""
    started = Phases(small_parts(), device="cpu")
    started.start("train")
    return started


def state(small: Phases) -> list[Any]:
    modules = [small.module(name) for name in ("unet", "vae")]
    return [
        [(id(m), m.training) for module in modules for m in module.modules()],
        [(id(p), p.requires_grad, p.data_ptr(), p.tolist()) for module in modules for p in module.parameters()],
        [None if p.grad is None else p.grad.tolist() for p in modules[0].parameters()],
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
        small.current,
    ]


# Names, and what cannot be entered


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda p: p.start("training"), "phase training: is unknown; there are train, validate, sample"),
        (lambda p: p.module("te"), "phase train: there is no part 'te'; the modules are unet, vae"),
        (lambda p: p.enter(Phase(("unet", "te"))).__enter__(), "phase custom: names te; the modules are unet, vae"),
        (
            lambda p: p.enter(Phase(("unet",), ("vae",))).__enter__(),
            "phase custom: trains vae, which it parks: add it to on_device",
        ),
    ],
)
def test_wrong_names_are_refused_and_change_nothing(act: Callable[[Phases], Any], message: str, small: Phases) -> None:
    before = state(small)
    with pytest.raises(PhaseError) as caught:
        act(small)
    assert str(caught.value) == message and caught.value.phase == message.split(":")[0].removeprefix("phase ")
    assert caught.value.offenders == ()
    assert state(small) == before


def test_one_module_under_two_names_is_refused() -> None:
    """One name could be parked in eval mode, and the other trained on the device."""
    parts = small_parts()
    with pytest.raises(PhaseError, match="unet and model are one module: give it under one name"):
        Phases({**parts, "model": torch.nn.parallel.DataParallel(parts["unet"])}, device="cpu")


def test_a_part_without_values_is_refused_where_a_phase_needs_it() -> None:
    parts = small_parts()
    parts["vae"] = torch.nn.Linear(2, 2, device="meta").requires_grad_(False)
    small = Phases(parts, device="cpu")
    small.start("train")
    assert small.not_moved() == {"vae": "weight is on meta and holds no values"}
    with small.enter("validate"):
        with pytest.raises(PhaseError, match="load the part first") as caught:
            small.lend("vae").__enter__()
        assert caught.value.offenders == ("vae.weight",) and small.current == "validate"


def test_averages_come_in_and_out_of_a_nested_phase_once() -> None:
    training = Training(CPU, "ema")
    for _ in range(3):
        training.step()
    ema = training.ema
    assert ema is not None
    weight = training.unet.mid_block.resnets[0].conv1.weight
    trained = weight.detach().clone()
    with training.phases.enter("validate"):
        average = weight.detach().clone()
        assert not torch.equal(average, trained)
        with training.phases.enter("sample"):
            assert torch.equal(weight, average)
        assert torch.equal(weight, average), "the inner phase swapped them out"
    assert torch.equal(weight, trained) and ema.temp_stored_params is None


# Failures


@pytest.mark.parametrize("snapshot", [TrainingModes, Weights])
def test_a_restore_that_fails_keeps_none_of_the_others_from_it(
    snapshot: Any, small: Phases, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = snapshot.restore

    def fail(self: Any) -> None:
        restore(self)
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(snapshot, "restore", fail)
    before = state(small)
    with pytest.raises(PhaseError, match="not everything could be put back") as caught, small.enter("validate"):
        small.module("unet").train().requires_grad_(False)
        torch.set_grad_enabled(True)
        torch.rand(3)
    assert caught.value.offenders == (f"{snapshot.__name__}: ZeroDivisionError: on purpose",)
    assert caught.value.phase == "validate" and caught.value.__context__ is None
    assert state(small) == before


@pytest.mark.parametrize("raised", [ZeroDivisionError("in the body"), KeyboardInterrupt(), SystemExit(3)])
def test_what_the_body_raised_comes_out_as_it_is(raised: BaseException, small: Phases) -> None:
    before = state(small)
    with pytest.raises(type(raised)) as caught, small.enter("validate"), small.lend("vae"):
        raise raised
    assert caught.value is raised and caught.value.__context__ is None
    assert state(small) == before


def test_a_failure_on_the_way_in_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(CPU, "ema")
    training.step()
    before = state_of(training)
    copy_to = training.ema.copy_to

    def fail(parameters: Any) -> None:
        copy_to(parameters)
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr(training.ema, "copy_to", fail)
    with pytest.raises(torch.OutOfMemoryError), training.phases.enter("validate"):
        pytest.fail("the phase began")
    assert differences(before, state_of(training)) == []


# Ctrl-C


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_at_any_line_of_the_switch_leaves_no_trace(small: Phases) -> None:
    """At each line of phases.py, model_parts.py and signals.py in turn, from the way in until all is put back."""
    files = {phases.__file__, model_parts.__file__, signals.__file__}
    before = state(small)
    num_interrupted = num_lines = 0
    while True:
        lines = _LinesUntil(num_lines, files)
        try:
            sys.settrace(lines.trace)
            with small.enter("validate"):
                small.module("unet").train()
                torch.rand(1)
        except KeyboardInterrupt:
            num_interrupted += 1
        finally:
            sys.settrace(None)
        assert state(small) == before, lines.where
        if lines.where is None:
            break
        num_lines += 1
    assert num_lines > 100 and num_interrupted > num_lines - 5


class _LinesUntil:
    """Presses Ctrl-C at a line, counted over the functions of some files."""

    def __init__(self, number: int, files: set[str]):
        self._left, self._files = number, files
        self.where: str | None = None

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line" and self.where is None:
            if self._left == 0:
                self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                press_ctrl_c()
            self._left -= 1
        return self.trace
