"""The phase switch with the modules of trainers: prepared, compiled, adapted and quantised, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schedulefree
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from diffusers.training_utils import EMAModel
from helpers.encoding import HIDDEN_SIZE, HIDDEN_SIZE_2
from helpers.phase_training import SIDE, small_unet
from peft import LoraConfig
from torch.utils._pytree import tree_leaves

from latentcache.models.tiny import tiny_parts
from latentcache.phases.phases import Phases

LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_v"], init_lora_weights="gaussian")
Wrap = Callable[[torch.nn.Module, torch.optim.Optimizer], tuple[Any, Any]]


def as_they_are(unet: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    return unet, optimizer


def fused_adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def forward(unet: Any, num: int = 2) -> torch.Tensor:
    """The UNet on `num` fixed samples: draws nothing but the dropout of train mode."""
    return unet(
        torch.linspace(-1, 1, num * 4 * SIDE * SIDE).view(num, 4, SIDE, SIDE),
        torch.tensor([5, 600])[:num],
        torch.ones(num, 7, HIDDEN_SIZE + HIDDEN_SIZE_2),
        added_cond_kwargs={"text_embeds": torch.ones(num, HIDDEN_SIZE_2), "time_ids": torch.ones(num, 6)},
    ).sample


class WrappedRun:
    """Two runs made alike do the same, bit by bit. `prepare` changes the UNet before the optimizer is built."""

    def __init__(
        self,
        wrap: Wrap = as_they_are,
        *,
        make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] = fused_adamw,
        prepare: Callable[[Any], object] = lambda unet: None,
        parts: dict[str, Any] | None = None,
        **phases: Any,
    ):
        torch.manual_seed(3)
        self.unet = small_unet().train()
        prepare(self.unet)
        self.inner_optimizer = make_optimizer([p for p in self.unet.parameters() if p.requires_grad])
        self.wrapped, self.optimizer = wrap(self.unet, self.inner_optimizer)
        self.parts = {"unet": self.wrapped, "optimizer": self.optimizer, **(parts or {})}
        self.phases = Phases(self.parts, device="cpu", **phases)
        self.phases.start("train")
        self.losses: list[float] = []

    def backward(self) -> None:
        noise = torch.randn(2, 4, SIDE, SIDE)
        loss = F.mse_loss(forward(self.wrapped).float(), noise)
        loss.backward()
        self.losses.append(loss.item())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, validate: Callable[[WrappedRun], object] | None = None, *, num_steps: int = 3) -> list[Any]:
        """All steps, with `validate` after the backward of one and the update of another; the outcome."""
        for number in range(num_steps):
            self.backward()
            if validate is not None and number == 1:
                validate(self)
            self.update()
            if validate is not None and number == 1:
                validate(self)
        return self.outcome()

    def outcome(self) -> list[Any]:
        """Losses, weights, optimizer state, and the next draw."""
        states = [self.unet.state_dict(), self.inner_optimizer.state_dict()["state"]]
        tensors = [leaf for leaf in tree_leaves(states) if isinstance(leaf, torch.Tensor)]
        return [*self.losses, *(tensor.detach().clone() for tensor in tensors), torch.rand(()).item()]


def validate(run: WrappedRun) -> torch.Tensor:
    """A phase with a forward of the eager module in it."""
    with run.phases.enter("validate") as phases:
        assert not phases.module("unet").training
        output = forward(phases.module("unet"), num=1)
        assert not output.requires_grad and output.isfinite().all()
        torch.rand(5)
        return output


def assert_same(one: list[Any], other: list[Any]) -> None:
    """Bit by bit."""
    assert len(one) == len(other)
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, f"value {number} differs"


def assert_as_without(
    make: Callable[[], WrappedRun], validate: Callable[[WrappedRun], object] = validate
) -> WrappedRun:
    """A run with phases in the middle gives what one without them gives. Returns the run with them."""
    expected = make().run()
    assert not torch.equal(expected[len(expected) // 2], torch.zeros(())), "nothing was trained"
    run = make()
    assert_same(run.run(validate), expected)
    return run


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


# What other software manages


def named_like(package: str) -> type[torch.nn.Parameter]:
    """A Parameter class as a package of quantised weights has it."""
    return type("Params4bit", (torch.nn.Parameter,), {"__module__": f"{package}.nn"})


def quantised(unet: Any) -> None:
    add_lora(unet)
    layer = unet.mid_block.attentions[0].proj_in
    layer.weight = named_like("bitsandbytes")(layer.weight.data, requires_grad=False)


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
