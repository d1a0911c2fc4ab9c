"""The phase switch with the modules of trainers, on the CPU: prepared by accelerate, compiled, under block swap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schedulefree
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from diffusers import UNet2DConditionModel
from helpers.phase_runs import assert_as_without, predict
from helpers.phase_training import Training

from latentcache.errors import PhaseError
from latentcache.phases.phases import Phase, Phases

CPU = torch.device("cpu")


@pytest.fixture
def accelerator_state() -> Iterator[None]:
    """accelerate keeps what the first Accelerator of a process was made with."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Prepared(Training):
    """By accelerate, which puts autocast around the UNet's forward."""

    def wrap(self) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        self.unet = self.parts["unet"] = self.accelerator.prepare(self.unet)

    def optimizer_over(self, parameters: list[torch.nn.Parameter]) -> Any:
        return self.accelerator.prepare(super().optimizer_over(parameters))


class PreparedScheduleFree(Prepared):
    """A schedule-free optimizer around another one, which is no torch optimizer."""

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


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.first(x))


def compile_whole(net: Net, backend: Any) -> Any:
    return torch.compile(net, backend=backend)


def compile_in_place(net: Net, backend: Any) -> Any:
    net.compile(backend=backend)
    return net


def compile_regions_around(net: Net, backend: Any) -> Any:
    """As accelerate does with `use_regional_compilation`: wrappers take the submodules' places."""
    net.block = torch.compile(net.block, backend=backend)
    return net


@pytest.mark.parametrize(
    ("compiled", "immovable"), [(compile_whole, ()), (compile_in_place, ("unet",)), (compile_regions_around, ())]
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

    net = compiled(Net(), backend)
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


# Models whose blocks a trainer swaps: a phase runs them in the mode for inference, and leaves that for training.


class Swapper:
    """The mode, and whether the first blocks are away."""

    def __init__(self) -> None:
        self.mode, self.is_away, self.fails_at = "training", False, ""
        self.is_known, self.forward_only = True, False
        """Whether the mode can be seen, as both trainers name it; a model may keep its own elsewhere."""
        self.events = list[str]()

    def switch(self, mode: str) -> None:
        assert self.mode != mode, "a trainer switches there and back"
        self.mode, self.is_away, self.forward_only = mode, False, self.is_known and mode == "inference"
        self.events.append(mode)
        if mode == self.fails_at:
            raise MemoryError("no room for the blocks")


class SwappedUNet(UNet2DConditionModel):
    """A UNet with the methods of musubi-tuner's and sd-scripts'. In training a forward takes blocks away until the
    backward."""

    swapper: Swapper

    def switch_block_swap_for_inference(self) -> None:
        self.swapper.switch("inference")

    def switch_block_swap_for_training(self) -> None:
        self.swapper.switch("training")

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
        self.swapper = self.unet.swapper = Swapper()


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
        assert training.swapper.events == ["inference", "training"] * 2, "the outermost phase alone switches"

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
    training = Swapped(CPU)
    training.swapper.fails_at = mode
    expected = (MemoryError, "no room") if mode == "inference" else (PhaseError, "BlockSwap: MemoryError: no room")
    with pytest.raises(expected[0], match=expected[1]), training.phases.enter("validate"):
        assert mode == "training", "the phase was not entered"
    assert training.phases.current == "train" and training.unet.training
    assert training.swapper.events == ["inference", "training"]
