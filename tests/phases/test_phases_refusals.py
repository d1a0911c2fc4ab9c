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

from latentcache.errors import DeviceMismatchError, PhaseError
from latentcache.phases import model_parts, phases
from latentcache.phases.phases import Phase, Phases
from latentcache.phases.state import TrainingModes
from latentcache.phases.weights import Weights
from latentcache.utils import signals


def small_parts() -> dict[str, Any]:
    unet = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
    unet(torch.ones(2, 3)).sum().backward()
    vae = torch.nn.Linear(2, 2).eval().requires_grad_(False)
    # The tokenizer is no part that a phase has anything to do with.
    return {"unet": unet, "vae": vae, "optimizer": torch.optim.SGD(unet.parameters()), "tokenizer": object()}


@pytest.fixture
def small() -> Phases:
    """A run of a few numbers."""
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
        (lambda p: p.lend("te").__enter__(), "phase train: there is no part 'te'; the modules are unet, vae"),
        (lambda p: p.enter(Phase(("unet",), ("te",))).__enter__(), "phase custom: names te; the modules are unet, vae"),
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
    assert state(small) == before


def test_wrong_parts_are_refused() -> None:
    """Under two names a module could be parked in eval mode, and trained on the device."""
    parts = small_parts()
    with pytest.raises(PhaseError, match="unet and model are one module: give it under one name"):
        Phases({**parts, "model": torch.nn.parallel.DataParallel(parts["unet"])}, device="cpu")
    with pytest.raises(PhaseError, match=r"immovable names \['te'\]; the modules are unet, vae"):
        Phases(parts, device="cpu", immovable=["te"])


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
        with pytest.raises(PhaseError, match="start is for the phase outside of all others"):
            small.start()


def test_a_tensor_that_is_elsewhere_is_refused_at_the_beginning(small: Phases) -> None:
    before, optimizer = state(small), small.parts["optimizer"]
    weight = small.module("unet")[0].weight
    optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight, device="meta")
    for begin in (small.enter("validate").__enter__, small.start, small.place):
        with pytest.raises(
            DeviceMismatchError, match=r"optimizer\.unet\.0\.weight\.momentum_buffer .* is meta, expected cpu"
        ):
            begin()
        assert state(small) == before


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


def test_a_failure_on_the_way_in_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(torch.device("cpu"), "ema")
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


def test_ctrl_c_at_any_line_of_the_switch_leaves_no_trace(small: Phases) -> None:
    """At each line of phases.py, model_parts.py and signals.py in turn, from the way in until all is put back."""
    files = {phases.__file__, model_parts.__file__, signals.__file__}
    before, tracer = state(small), sys.gettrace()  # a measurement of coverage has one
    num_interrupted = num_lines = left = 0
    where: str | None = None

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left, where
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and where is None:
            if left == 0:
                where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                os.kill(os.getpid(), signal.SIGINT)
            left -= 1
        return trace

    while True:
        left, where = num_lines, None
        try:
            sys.settrace(trace)
            with small.enter("validate"):
                small.module("unet").train()
                torch.rand(1)
        except KeyboardInterrupt:
            num_interrupted += 1
        finally:
            sys.settrace(tracer)
        assert state(small) == before, where
        if where is None:
            break
        num_lines += 1
    assert num_lines > 100 and num_interrupted > num_lines - 5
