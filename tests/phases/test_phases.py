"""The phase switch on the CPU, also with modules of trainers: training continues as if there had been no phase.

Then its errors: wrong names, unusable parts, failing restores, and Ctrl-C at any moment.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import schedulefree
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from diffusers import UNet2DConditionModel
from diffusers.training_utils import EMAModel
from helpers.phase_disturbances import differences, state_of
from helpers.phase_runs import SCENARIOS, assert_as_without, in_inference_mode, leave_no_trace, name_of, predict
from helpers.phase_training import VARIANTS, Training

from latentcache import load_checkpoint, save_checkpoint
from latentcache.errors import CheckpointError, DeviceMismatchError, PhaseError
from latentcache.phases import model_parts, phases
from latentcache.phases.phases import Phase, Phases
from latentcache.phases.state import ComputeModes, RandomStreams, Snapshot, TrainingModes
from latentcache.phases.weights import EmaWeights, Gradients, ScheduleFreeMode, Weights
from latentcache.utils import signals

CPU = torch.device("cpu")


@pytest.mark.parametrize("scenario", [*SCENARIOS, in_inference_mode], ids=name_of)
def test_training_goes_on_bit_by_bit(scenario: Callable[[Training], None]) -> None:
    """Other variants of training are in tests/sim and in the tests of the runner."""
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
    """No snapshot is covered by another one, and the disturbances reveal each that is missing."""
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
    for are_in in (True, False):  # in because of other code, which keeps them there
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
    """Autocast caches casts of the trained weights, which the phase must not use."""
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


def test_gradients_of_an_accumulation_come_back_whatever_code_in_a_phase_computes() -> None:
    net, vae = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters())
    phases = Phases({"unet": net, "vae": vae, "optimizer": optimizer}, device="cpu")
    net(torch.ones(1, 2)).sum().backward()
    before = [(parameter.grad, parameter.grad.clone()) for parameter in net.parameters()]
    for _ in range(2):
        with phases.enter("validate"), torch.enable_grad():
            vae.requires_grad_(True)(torch.ones(1, 2)).sum().backward()
            net(torch.ones(1, 2)).sum().backward()
            with phases.enter("sample"):
                optimizer.zero_grad(set_to_none=False)
            net(torch.ones(1, 2)).sum().backward()
        for parameter, (gradient, values) in zip(net.parameters(), before, strict=True):
            assert parameter.grad is gradient and torch.equal(gradient, values)
        assert vae.weight.grad is None


class TorchEma:
    """With torch_ema's methods: what `store` kept stays after `restore`."""

    def __init__(self, parameters: list[torch.nn.Parameter]):
        self.shadow_params = [torch.full_like(parameter, 0.25) for parameter in parameters]
        self.collected_params: list[torch.Tensor] | None = None

    def store(self, parameters: list[torch.nn.Parameter]) -> None:
        self.collected_params = [parameter.clone() for parameter in parameters]

    def copy_to(self, parameters: list[torch.nn.Parameter]) -> None:
        for average, parameter in zip(self.shadow_params, parameters, strict=True):
            parameter.data.copy_(average)

    def restore(self, parameters: list[torch.nn.Parameter]) -> None:
        for kept, parameter in zip(self.collected_params or [], parameters, strict=True):
            parameter.data.copy_(kept)


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("kind", [EMAModel, TorchEma])
def test_averages_that_code_in_a_phase_swaps_too_leave_the_trained_weights(kind: Any, used_before: bool) -> None:
    """As trainers' own validation does, which a phase may call."""
    net = torch.nn.Linear(2, 2)
    parameters, ema = list(net.parameters()), kind(list(net.parameters()))
    for average in ema.shadow_params:
        average.fill_(0.25)
    phases, trained = Phases({"unet": net, "ema": ema}, device="cpu"), net.weight.clone()

    def swap(*names: str) -> None:
        for name in names:
            getattr(ema, name)(parameters)

    if used_before:
        swap("store", "copy_to", "restore")
    for is_averaged in (True, False):
        for inside in ([], ["store", "copy_to", "restore"], ["store", "copy_to"]):
            with phases.enter(Phase(on_device=("unet",), averaged=is_averaged)):
                assert (net.weight == 0.25).all() == is_averaged
                swap(*inside)
                with phases.enter("sample"):
                    assert (net.weight == 0.25).all()
                    swap(*inside if is_averaged else ())
            assert torch.equal(net.weight, trained), (is_averaged, inside)


@pytest.mark.parametrize("variant", ["ema", "schedule-free"])
def test_no_checkpoint_is_written_or_loaded_within_a_phase(variant: str, tmp_path: Path) -> None:
    """The model holds averaged weights there, and the end of the phase would undo a part of a load."""
    training = Training(CPU, variant).run()
    path = save_checkpoint(tmp_path / "last.pt", model=training.unet, optimizer=training.optimizer)
    before, written = state_of(training), path.read_bytes()
    for parts in ({"model": training.unet}, {"model": {"net": torch.nn.Sequential(training.unet)}}):
        with training.phases.enter("validate"), training.phases.lend("vae"):
            with pytest.raises(CheckpointError, match="model: is in the phase validate"):
                save_checkpoint(path, **parts)
            with pytest.raises(CheckpointError, match="model: is in the phase validate"):
                load_checkpoint(path, **parts)
            save_checkpoint(tmp_path / "other.pt", model=torch.nn.Linear(1, 1))  # no phase has this one
    assert path.read_bytes() == written and differences(before, state_of(training)) == []
    load_checkpoint(path, model=training.unet, optimizer=training.optimizer)


# Prepared by accelerate


@pytest.fixture
def accelerator_state() -> Iterator[None]:
    """Reset the process-wide state of accelerate."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Prepared(Training):
    """Prepared by accelerate, which puts autocast around the UNet's forward."""

    def wrap(self) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        self.unet = self.parts["unet"] = self.accelerator.prepare(self.unet)

    def optimizer_over(self, parameters: list[torch.nn.Parameter]) -> Any:
        return self.accelerator.prepare(super().optimizer_over(parameters))


class PreparedScheduleFree(Prepared):
    """With a schedule-free wrapper around an optimizer, which is not a torch optimizer."""

    def optimizer_over(self, parameters: list[torch.nn.Parameter]) -> Any:
        optimizer = schedulefree.ScheduleFreeWrapper(torch.optim.SGD(parameters, lr=1e-2), momentum=0.9)
        optimizer.train()
        return optimizer


@pytest.mark.parametrize(
    ("kind", "variant"), [(Prepared, "plain"), (Prepared, "schedule-free"), (PreparedScheduleFree, "plain")]
)
@pytest.mark.usefixtures("accelerator_state")
def test_what_accelerate_prepared_trains_on_bit_by_bit(kind: type[Training], variant: str) -> None:
    dtypes, are_averaged = [], []

    def validate(training: Training) -> None:
        weight = training.unet.conv_in.weight
        trained = weight.clone()
        for _ in range(2):
            with training.phases.enter("validate") as phases:
                handle = phases.module("unet").conv_in.register_forward_hook(lambda *_: dtypes.append(_[2].dtype))
                assert predict(training).dtype == torch.float32
                handle.remove()
                are_averaged.append(not torch.equal(weight, trained))
        assert torch.equal(weight, trained)

    assert_as_without(validate, CPU, variant, kind)
    assert set(dtypes) == {torch.bfloat16}, "the phase measures in the precision of the training"
    assert set(are_averaged) == {variant == "schedule-free" or kind is PreparedScheduleFree}


# Compiled


class Net(torch.nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # torch's own is never compiled
        return self[1](self[0](x))


def compile_regions_around(net: Any, backend: Any) -> Any:
    """As accelerate's `use_regional_compilation` does: wrappers replace the submodules."""
    net[1] = torch.compile(net[1], backend=backend)
    return net


@pytest.mark.parametrize(
    ("compiled", "immovable"),
    [
        (torch.compile, ()),
        (lambda net, backend: net.compile(backend=backend) or net, ("unet",)),
        (compile_regions_around, ()),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_eager_module_runs_in_a_phase_and_the_compiled_one_after_it(
    compiled: Callable[..., Any], immovable: tuple[str, ...]
) -> None:
    torch._dynamo.reset()
    done: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        done.append("compiled")
        return lambda *args: (done.append("called"), graph.forward(*args))[1]

    net = compiled(Net(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)), backend=backend)
    phases = Phases({"unet": net}, device="cpu", immovable=immovable)
    phases.start("train")
    net(torch.ones(2, 3)).sum().backward()
    assert done == ["compiled", "called"]
    for num in (1, 3):
        with phases.enter("validate"):
            phases.module("unet")(torch.ones(num, 3))
            with phases.enter("sample"):
                phases.module("unet")(torch.ones(num, 3))
                phases.place()
                phases.module("unet")(torch.ones(num + 1, 3))
    assert done == ["compiled", "called"], "a compiled module ran in a phase"
    net(torch.ones(2, 3)).sum().backward()
    assert done == ["compiled", "called", "called"], "compiled again, or left eager"


# Models with block swap: a phase runs them in inference mode, and leaves them in training mode.


class SwappedUNet(UNet2DConditionModel):
    """Has musubi-tuner's and sd-scripts' methods. In training a forward takes blocks away until the backward."""

    swapper: SimpleNamespace

    def switch_block_swap_for_inference(self) -> None:
        self._switch("inference")

    def switch_block_swap_for_training(self) -> None:
        self._switch("training")

    def _switch(self, mode: str) -> None:
        swapper = self.swapper
        assert swapper.mode != mode, "a trainer switches back and forth"
        swapper.mode, swapper.is_away, swapper.forward_only = mode, False, swapper.is_known and mode == "inference"
        swapper.events.append(mode)
        if mode == swapper.fails_at:
            raise MemoryError("no room for the blocks")

    def forward(self, *arguments: Any, **options: Any) -> Any:
        if self.swapper.is_away:
            raise RuntimeError("the weights of blocks.0 are on the CPU")
        made = super().forward(*arguments, **options)
        if self.swapper.mode == "training":
            self.swapper.is_away = True
            made.sample.register_hook(lambda _: setattr(self.swapper, "is_away", False))
        return made


class Swapped(Training):
    def wrap(self) -> None:
        self.unet.__class__ = SwappedUNet
        # `forward_only` is the trainers' name for the mode, unless it is not `is_known`.
        state = {"mode": "training", "is_away": False, "is_known": True, "forward_only": False}
        self.swapper = self.unet.swapper = SimpleNamespace(**state, events=[], fails_at="")


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("variant", ["ema", "schedule-free"])
def test_forwards_follow_each_other_and_training_goes_on(variant: str, is_known: bool) -> None:
    def validate(training: Swapped) -> None:
        training.swapper.is_known = is_known
        for phase in ("validate", "sample"):
            with training.phases.enter(phase):
                predict(training)
                with training.phases.enter(Phase(on_device=())), training.phases.enter("sample"):
                    predict(training)
                with training.phases.lend("vae"):
                    predict(training)
                assert training.swapper.mode == "inference"
            assert training.swapper.mode == "training"
        assert training.swapper.events == ["inference", "training"] * 2, "only the outermost phase switches"

    assert_as_without(validate, CPU, variant, Swapped)


def test_a_phase_that_trains_or_parks_the_model_or_finds_it_switched_does_not_switch() -> None:
    training = Swapped(CPU)
    for phase in ("train", Phase(on_device=("vae",))):
        with training.phases.enter(phase):
            assert training.swapper.mode == "training"
    with training.phases.lend("vae"):  # while the model is trained
        assert training.swapper.events == []
    training.unet.switch_block_swap_for_inference()
    with training.phases.enter("validate"):
        predict(training)
    assert training.swapper.events == ["inference"]


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_switch_that_fails_is_an_error_and_all_else_is_put_back(mode: str) -> None:
    """Even with averages in, which come in before the switch."""
    training = Swapped(CPU, "ema")
    training.step()
    before, training.swapper.fails_at = state_of(training), mode
    expected = (MemoryError, "no room") if mode == "inference" else (PhaseError, "BlockSwap: MemoryError: no room")
    with pytest.raises(expected[0], match=expected[1]), training.phases.enter("validate"):
        assert mode == "training", "the phase was not entered"
    assert training.phases.current == "train" and differences(before, state_of(training)) == []
    assert training.swapper.events == ["inference", "training"]


# Errors, in a training run with few weights


def small_parts() -> dict[str, Any]:
    unet = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
    unet(torch.ones(2, 3)).sum().backward()
    vae = torch.nn.Linear(2, 2).eval().requires_grad_(False)
    # Phases ignore the tokenizer.
    return {"unet": unet, "vae": vae, "optimizer": torch.optim.SGD(unet.parameters()), "tokenizer": object()}


@pytest.fixture
def small() -> Phases:
    """A training run with few weights."""
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
    """With two names a module could be both parked in eval mode and trained on the device."""
    parts = small_parts()
    with pytest.raises(PhaseError, match="unet and model are one module: give it one name"):
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
        with pytest.raises(PhaseError, match="start begins the outermost phase"):
            small.start()


def test_a_misplaced_tensor_is_refused_at_the_beginning(small: Phases) -> None:
    before, optimizer = state(small), small.parts["optimizer"]
    weight = small.module("unet")[0].weight
    optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight, device="meta")
    for begin in (small.enter("validate").__enter__, small.start, small.place):
        with pytest.raises(
            DeviceMismatchError, match=r"optimizer\.unet\.0\.weight\.momentum_buffer .* is meta, expected cpu"
        ):
            begin()
        assert state(small) == before


def test_an_optimizer_of_two_parts_is_in_place_while_one_of_them_is_frozen() -> None:
    """As trainers that train parts in turn do, and code in a phase."""
    parts = {"unet": torch.nn.Linear(2, 2), "text_encoder": torch.nn.Linear(2, 2)}
    parts["optimizer"] = torch.optim.SGD([p for name in tuple(parts) for p in parts[name].parameters()])  # type: ignore
    for frozen in parts["unet"], parts["text_encoder"]:
        phases = Phases(parts, device="cpu", immovable=["unet"])
        frozen.requires_grad_(False)
        phases.start("train")
        with phases.enter("validate"), phases.lend("text_encoder"):
            pass
        frozen.requires_grad_(True)


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
    with pytest.raises(PhaseError, match="not everything could be restored") as caught, small.enter("validate"):
        small.module("unet").train().requires_grad_(False)
        torch.set_grad_enabled(True)
        torch.rand(3)
    assert caught.value.offenders == (f"{snapshot.__name__}: ZeroDivisionError: on purpose",)
    assert caught.value.phase == "validate" and caught.value.__context__ is None
    assert state(small) == before


# Ctrl-C


def test_ctrl_c_at_any_line_of_the_switch_leaves_no_trace(small: Phases) -> None:
    """At each line of phases.py, model_parts.py and signals.py in turn, from entering until all is restored."""
    files = {phases.__file__, model_parts.__file__, signals.__file__}
    before, tracer = state(small), sys.gettrace()  # set while coverage is measured
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
