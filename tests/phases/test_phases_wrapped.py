"""The phase switch with the modules of trainers: prepared, compiled, adapted and quantised, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schedulefree
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from diffusers.training_utils import EMAModel
from helpers.phase_wrapped import WrappedRun, assert_as_without, assert_same, forward, validate
from peft import LoraConfig

from latentcache.models.tiny import tiny_parts
from latentcache.phases.phases import Phases

LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_v"], init_lora_weights="gaussian")


@pytest.fixture
def accelerator_state() -> Iterator[None]:
    """accelerate keeps what the first Accelerator of a process was made with."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def prepared(mixed_precision: str, **options: Any) -> Callable[[], WrappedRun]:
    def make() -> WrappedRun:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
        return WrappedRun(lambda unet, optimizer: accelerator.prepare(unet, optimizer), **options)

    return make


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.usefixtures("accelerator_state")
def test_what_accelerate_prepared_trains_on_bit_by_bit(mixed_precision: str) -> None:
    dtypes = []

    def watch(run: WrappedRun) -> None:
        with run.phases.enter("validate") as phases:
            handle = phases.module("unet").conv_in.register_forward_hook(
                lambda module, args, output: dtypes.append(output.dtype)
            )
            assert forward(phases.module("unet")).dtype == torch.float32
            handle.remove()
        validate(run)

    run = assert_as_without(prepared(mixed_precision), watch)
    assert type(run.optimizer).__name__ == "AcceleratedOptimizer"
    # accelerate puts autocast around forward: the phase measures in the precision of the training.
    assert set(dtypes) == {torch.bfloat16 if mixed_precision == "bf16" else torch.float32}


def averaging(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return schedulefree.AdamWScheduleFree(parameters, lr=1e-2, foreach=False)


def averaging_around_another(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return schedulefree.ScheduleFreeWrapper(torch.optim.SGD(parameters, lr=1e-2), momentum=0.9)


@pytest.mark.parametrize("make_optimizer", [averaging, averaging_around_another])
@pytest.mark.usefixtures("accelerator_state")
def test_a_schedule_free_optimizer_that_accelerate_prepared(make_optimizer: Callable[..., Any]) -> None:
    def make() -> WrappedRun:
        run = prepared("no", make_optimizer=make_optimizer)()
        run.inner_optimizer.train()
        return run

    differs = []

    def averaged(run: WrappedRun) -> None:
        trained = run.unet.conv_in.weight.clone()
        with run.phases.enter("validate"):
            differs.append(not torch.equal(run.unet.conv_in.weight, trained))
        assert torch.equal(run.unet.conv_in.weight, trained)

    assert_as_without(make, averaged)
    assert differs[-1], "averages are in from the second update on"


# Compiled


class Counting:
    """A backend that counts what it compiles, and how often that is called."""

    def __init__(self) -> None:
        self.num_compiled = self.num_called = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.num_compiled += 1

        def call(*args: torch.Tensor) -> Any:
            self.num_called += 1
            return graph.forward(*args)

        return call

    @property
    def counts(self) -> tuple[int, int]:
        return self.num_compiled, self.num_called


OF_A_BLOCK = "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
"""torch.compile looks at the gradient of a block's input."""


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_whole(unet: torch.nn.Module, backend: Any) -> Any:
    return torch.compile(unet, backend=backend)


def compile_in_place(unet: torch.nn.Module, backend: Any) -> Any:
    unet.compile(backend=backend)
    return unet


def compile_regions_around(unet: Any, backend: Any) -> Any:
    """As accelerate does with `use_regional_compilation`: wrappers take the submodules' places."""
    unet.mid_block = torch.compile(unet.mid_block, backend=backend)
    return unet


@pytest.mark.parametrize(
    ("compiled", "immovable"),
    [
        (compile_whole, ()),
        (compile_in_place, ("unet",)),
        (compile_regions_around, ()),
    ],
)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings(OF_A_BLOCK)
def test_the_eager_module_runs_in_a_phase_and_the_compiled_one_after_it(
    compiled: Callable[..., Any], immovable: tuple[str, ...]
) -> None:
    backend = Counting()
    run = WrappedRun(lambda unet, optimizer: (compiled(unet, backend), optimizer), immovable=immovable)
    run.backward()
    run.update()
    run.backward()
    run.update()
    num_compiled, before = backend.counts
    per_step = before // 2
    assert num_compiled and per_step
    for _ in range(2):
        validate(run)
        with run.phases.enter("sample") as phases:
            forward(phases.module("unet"))
            phases.place()
            forward(phases.module("unet"), num=1)
    assert backend.counts == (num_compiled, before), "a compiled module ran in a phase"
    run.backward()
    run.update()
    assert backend.counts == (num_compiled, before + per_step), "compiled again, or left eager"


# Adapters


def add_lora(unet: Any) -> None:
    unet.add_adapter(LORA)


def test_a_lora_in_eval_mode_is_put_back_in_eval_mode() -> None:
    """A UNet whose frozen base is in eval mode while its adapters train: the flags are those of each submodule."""

    run = WrappedRun(prepare=add_lora)
    run.unet.eval()
    for name, module in run.unet.named_modules():
        if "lora_" in name:
            module.train()
    modes = {name: module.training for name, module in run.unet.named_modules()}
    assert set(modes.values()) == {True, False}
    with run.phases.enter("validate"):
        assert not any(module.training for module in run.unet.modules())
        with run.phases.enter("train"):
            assert all(module.training for module in run.unet.modules())
        assert not any(module.training for module in run.unet.modules())
    assert {name: module.training for name, module in run.unet.named_modules()} == modes


# What other software manages


def named_like(package: str) -> type[torch.nn.Parameter]:
    """A Parameter class as a package of quantised weights has it."""
    return type("Params4bit", (torch.nn.Parameter,), {"__module__": f"{package}.nn"})


def quantised(unet: Any) -> None:
    add_lora(unet)
    layer = unet.mid_block.attentions[0].proj_in
    layer.weight = named_like("bitsandbytes")(layer.weight.data, requires_grad=False)


def test_a_quantised_base_is_left_and_what_trains_on_it_is_put_back() -> None:
    """QLoRA: the tensors stay, everything else is put back as on any other part."""

    def disturb(run: WrappedRun) -> None:
        with run.phases.enter("validate"):
            forward(run.unet)
            run.unet.requires_grad_(False)
            run.optimizer.zero_grad()
            run.unet.train()

    run = assert_as_without(lambda: WrappedRun(prepare=quantised), disturb)
    assert run.phases.not_moved() == {
        "unet": "mid_block.attentions.0.proj_in.weight is a bitsandbytes Params4bit, which its package places"
    }


def partitioned(unet: Any) -> None:
    for number, parameter in enumerate(unet.parameters()):
        parameter.ds_id = number


def test_a_partitioned_part_keeps_what_its_software_changes() -> None:
    run = WrappedRun(prepare=partitioned)
    assert run.phases.not_moved().get("unet") == "conv_in.weight is a partition of DeepSpeed ZeRO-3"
    taken = run.unet.conv_in.weight
    with run.phases.enter("validate"):
        assert not run.unet.training
        run.unet.conv_in.weight = torch.nn.Parameter(torch.ones_like(taken))  # as a gather may do it
        run.unet.requires_grad_(False)
    assert run.unet.conv_in.weight is not taken
    assert run.unet.training and all(p.requires_grad for p in run.unet.parameters() if p is not run.unet.conv_in.weight)


# What else training keeps


@pytest.mark.parametrize("inside", [True, False])
def test_a_phase_in_inference_mode(inside: bool) -> None:
    def validate_so(run: WrappedRun) -> None:
        if inside:
            with run.phases.enter("validate"), torch.inference_mode():
                forward(run.unet)
                with run.phases.lend("vae"):
                    pass
        else:
            with torch.inference_mode(), run.phases.enter("validate"):
                forward(run.unet)
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()

    assert_as_without(lambda: WrappedRun(parts={"vae": tiny_parts(1)["vae"]}), validate_so)


def test_an_average_that_is_in_already_stays_in() -> None:
    run = WrappedRun()
    run.backward()
    run.update()
    ema = EMAModel(run.unet.parameters(), decay=0.5)
    for _ in range(2):
        run.backward()
        run.update()
        ema.step(run.unet.parameters())
    phases = Phases({**run.parts, "ema": ema}, device="cpu")
    trained = run.unet.conv_in.weight.clone()
    ema.store(run.unet.parameters())
    ema.copy_to(run.unet.parameters())
    average = run.unet.conv_in.weight.clone()
    assert not torch.equal(average, trained)
    with phases.enter("validate"), phases.enter("sample"):
        assert torch.equal(run.unet.conv_in.weight, average)
    assert torch.equal(run.unet.conv_in.weight, average)
    ema.restore(run.unet.parameters())
    with phases.enter("validate"):
        assert torch.equal(run.unet.conv_in.weight, average)
        run.unet.requires_grad_(False)
        with phases.enter("sample"):
            assert torch.equal(run.unet.conv_in.weight, average)
    assert_same([run.unet.conv_in.weight], [trained])


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


def test_a_phase_inside_a_cast_gives_a_gradient_back_in_the_dtype_of_the_cast() -> None:
    net = torch.nn.Linear(2, 2)
    phases = Phases({"unet": net}, device="cpu")
    net(torch.ones(1, 2)).sum().backward()
    gradient = net.weight.grad.clone()
    with phases.enter("validate"):
        net.to(torch.float64)
        with phases.enter("sample"):
            net.zero_grad()
        assert net.weight.grad.dtype == net.weight.dtype == torch.float64
    assert net.weight.dtype == torch.float32 and torch.equal(net.weight.grad, gradient)
