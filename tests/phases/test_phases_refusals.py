"""What phases refuse, report and survive: wrong names, failing restores, Ctrl-C at any moment, nested errors."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from diffusers.training_utils import EMAModel
from helpers.phase_disturbances import DISTURBANCES, FLAGS, differences, state_of
from helpers.phase_training import Training
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from latentcache.errors import LatentCacheError, PhaseError
from latentcache.phases import model_parts, phases
from latentcache.phases.phases import Phase, Phases
from latentcache.phases.state import ComputeModes, RandomStreams, TrainingModes
from latentcache.phases.weights import EmaWeights, Weights
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
        (lambda p: p.enter("eval").__enter__(), "phase eval: is unknown; there are train, validate, sample"),
        (lambda p: p.module("te"), "phase train: there is no part 'te'; the modules are unet, vae"),
        (lambda p: p.lend("te").__enter__(), "phase train: there is no part 'te'; the modules are unet, vae"),
        (lambda p: p.enter(Phase(("unet", "te"))).__enter__(), "phase custom: names te; the modules are unet, vae"),
        (lambda p: p.enter(Phase((), ("te",))).__enter__(), "phase custom: names te; the modules are unet, vae"),
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"immovable": ["te"]}, r"immovable names \['te'\]; the modules are unet, vae"),
        ({"validate": Phase(("te",))}, "phase validate: names te"),
        ({"train": Phase((), ("unet",))}, "phase train: trains unet, which it parks"),
    ],
)
def test_wrong_declarations_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PhaseError, match=message):
        Phases(small_parts(), device="cpu", **options)


def test_one_module_under_two_names_is_refused() -> None:
    """One name could be parked in eval mode, and the other trained on the device."""
    parts = small_parts()
    with pytest.raises(PhaseError, match="unet and model are one module: give it under one name"):
        Phases({**parts, "model": torch.nn.parallel.DataParallel(parts["unet"])}, device="cpu")


def test_start_inside_a_phase_is_refused(small: Phases) -> None:
    before = state(small)
    with small.enter("validate"):
        inside = state(small)
        with pytest.raises(PhaseError, match="start is for the phase outside of all others") as caught:
            small.start("train")
        assert caught.value.phase == "validate" and state(small) == inside
    assert state(small) == before


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


class Bare:
    """An EMA of another library."""

    shadow_params: list[torch.Tensor]

    def __init__(self, *methods: str, num: int | None = None):
        for method in methods:
            setattr(self, method, lambda parameters: None)
        if num is not None:
            self.shadow_params = [torch.zeros(1)] * num


@pytest.mark.parametrize(
    ("ema", "message"),
    [
        (Bare(num=4), "the ema is a Bare without store, copy_to, restore"),
        (Bare("store", "copy_to", num=4), "the ema is a Bare without restore"),
        (Bare("store", "copy_to", "restore"), "the ema is a Bare without shadow_params"),
        (
            Bare("store", "copy_to", "restore", num=3),
            "the ema averages 3 parameters, but the denoiser has 4, 4 of them trained; build it over one of these",
        ),
    ],
)
def test_an_ema_that_does_not_fit_is_refused(ema: Bare, message: str) -> None:
    small = Phases(small_parts() | {"ema": ema}, device="cpu")
    small.start("train")
    before = state(small)
    with pytest.raises(PhaseError, match=message), small.enter("validate"):
        pass
    assert state(small) == before
    with small.enter(Phase(on_device=("unet",))):
        assert small.current == "custom", "a phase without averages has no need of it"


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


def test_averages_that_someone_left_in_are_swapped_out_of_any_phase() -> None:
    parts = small_parts()
    parameters = list(parts["unet"].parameters())
    parts["ema"] = EMAModel([parameter * 2 for parameter in parameters])
    small = Phases(parts, device="cpu")
    small.start("train")
    before = state(small)
    with small.enter(Phase(on_device=("unet",))):
        parts["ema"].store(parameters)
        parts["ema"].copy_to(parameters)
        assert state(small) != before
    assert state(small) == before and parts["ema"].temp_stored_params is None


# Failures


@pytest.mark.parametrize("snapshot", [TrainingModes, Weights, ComputeModes, RandomStreams])
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
def test_what_the_body_raised_is_not_lost_by_a_failing_restore(
    raised: BaseException, small: Phases, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(TrainingModes, "restore", fail)
    with pytest.raises(PhaseError) as caught, small.enter("validate"):
        raise raised
    assert caught.value.__context__ is raised
    assert small.current == "train"


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


@pytest.fixture(autouse=True)
def handler_stays() -> Iterator[Any]:
    """The handler of Ctrl-C after each test is the one before it."""
    handler = signal.getsignal(signal.SIGINT)
    yield handler
    left = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, handler)
    assert left is handler


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("num_presses", [1, 2])
@pytest.mark.parametrize(
    "moment",
    [
        (TrainingModes, "restore"),
        (Weights, "restore"),
        (RandomStreams, "restore"),
        (Weights, "place"),
        (Weights, "changes"),
        (EmaWeights, "swap_in"),
        (EmaWeights, "restore"),
    ],
    ids=lambda moment: f"{moment[0].__name__}.{moment[1]}",
)
def test_ctrl_c_waits_while_state_is_put_in_or_back(
    moment: tuple[Any, str], num_presses: int, handler_stays: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = small_parts()
    parts["ema"] = EMAModel([parameter * 2 for parameter in parts["unet"].parameters()])
    small = Phases(parts, device="cpu")
    small.start("train")
    owner, name = moment
    act = getattr(owner, name)
    pressed = []

    def press_and_act(self: Any, *args: Any) -> Any:
        if not pressed:
            for _ in range(num_presses):
                press_ctrl_c()
            pressed.append(True)
            assert signal.getsignal(signal.SIGINT) is not handler_stays
        return act(self, *args)

    before = state(small)
    monkeypatch.setattr(owner, name, press_and_act)
    with pytest.raises(KeyboardInterrupt), small.enter("validate"):
        assert state(small) != before
        small.module("unet").train()
    assert pressed and signal.getsignal(signal.SIGINT) is handler_stays
    assert state(small) == before
    with small.enter("validate"):
        assert small.current == "validate"


def test_ctrl_c_in_the_body_comes_at_once(small: Phases) -> None:
    before = state(small)
    reached = []
    with pytest.raises(KeyboardInterrupt), small.enter("validate"), small.enter("sample"):
        press_ctrl_c()
        sum(range(1000))
        reached.append(True)
    assert not reached and state(small) == before


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


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_handlers_that_are_not_pythons_are_left_alone(handler: Any, small: Phases) -> None:
    kept = signal.signal(signal.SIGINT, handler)
    try:
        with small.enter("validate"):
            assert signal.getsignal(signal.SIGINT) is handler
            if handler is signal.SIG_IGN:
                press_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, kept)


def test_a_handler_of_the_trainer_is_called_once_after_all_is_put_back(
    small: Phases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that saves a checkpoint."""
    before, called = state(small), []
    restore = TrainingModes.restore

    def press_and_restore(self: TrainingModes) -> None:
        press_ctrl_c()
        restore(self)

    monkeypatch.setattr(TrainingModes, "restore", press_and_restore)
    kept = signal.signal(signal.SIGINT, lambda number, frame: called.append((number, state(small))))
    try:
        with small.enter("validate"):
            small.module("unet").train()
    finally:
        signal.signal(signal.SIGINT, kept)
    assert called == [(signal.SIGINT, before)]


def test_phases_work_in_another_thread(small: Phases) -> None:
    before, found = state(small), []

    def work() -> None:
        handler = signal.getsignal(signal.SIGINT)
        with small.enter("validate"), small.lend("vae"):
            found.append((small.module("unet").training, signal.getsignal(signal.SIGINT) is handler))
            torch.rand(2)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(False, True)]
    assert state(small) == before


# Nestings


class Deliberate(Exception):
    """What a body raises."""


ENTRIES: dict[str, Callable[[Phases], Any]] = {
    "validate": lambda phases: phases.enter("validate"),
    "sample": lambda phases: phases.enter("sample"),
    "train": lambda phases: phases.enter("train"),
    "vae alone": lambda phases: phases.enter(Phase(on_device=("vae",))),
    "lend": lambda phases: phases.lend("vae", "text_encoder"),
}
BY_NAME = {disturb.__name__: disturb for disturb in DISTURBANCES}
STEPS = st.lists(st.sampled_from(sorted({*BY_NAME, "place"} - {"averages"})), max_size=3)
"""Not averages that the body swaps into weights that it has cast before: the EMA stored the rounded ones."""


def body(inner: Any) -> Any:
    """Entry, disturbances, the phases inside, disturbances again, and whether it raises at the end."""
    return st.tuples(st.sampled_from(list(ENTRIES)), STEPS, inner, STEPS, st.booleans())


NESTINGS = body(st.lists(body(st.lists(body(st.just([])), max_size=2)), max_size=2))


def perform(training: Training, nesting: Any) -> None:
    entry, first, inner, last, raises = nesting
    with ENTRIES[entry](training.phases):
        for name in first:
            disturb(training, name)
        for one in inner:
            # What was disturbed may keep an inner phase from beginning: that is said, and undone with the outer one.
            with suppress(Deliberate, LatentCacheError):
                perform(training, one)
        for name in last:
            disturb(training, name)
        if raises:
            raise Deliberate


def disturb(training: Training, name: str) -> None:
    with suppress(LatentCacheError, AttributeError, AssertionError):  # what it disturbs may be gone already
        training.phases.place() if name == "place" else BY_NAME[name](training)


RUNS: dict[str, tuple[Training, dict[str, Any]]] = {}
"""A run of each variant, with its state, for all examples. After an example that failed there is a new one."""


def run_of(variant: str) -> tuple[Training, dict[str, Any]]:
    """The run, with every generator at the same place as it was when its state was taken."""
    if variant not in RUNS:
        training = Training(CPU, variant)
        for _ in range(3):
            training.step()
        seed()
        RUNS[variant] = training, state_of(training)
    seed()
    return RUNS[variant]


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@given(nesting=NESTINGS, variant=st.sampled_from(["ema", "lora"]))
@example(nesting=("train", ["dtypes"], [("validate", [], [], [], False)], [], False), variant="ema")
@example(nesting=("train", ["averages"], [], [], True), variant="ema")
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=set(hypothesis.Phase) - {hypothesis.Phase.explain},  # it traces every line: minutes
)
def test_nested_phases_with_errors_leave_no_trace(nesting: Any, variant: str) -> None:
    training, before = run_of(variant)
    defaults = {name: read() for name, (read, _, _) in FLAGS.items()}
    try:
        with suppress(Deliberate):
            perform(training, nesting)
        assert training.phases.current == "train"
        assert differences(before, state_of(training)) == []
    except BaseException:
        del RUNS[variant]
        raise
    finally:
        for name, (_, put, _) in FLAGS.items():
            put(defaults[name])
