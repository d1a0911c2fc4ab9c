"""A short training run whose UNet and optimizer are wrapped as trainers wrap them, with a phase in the middle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from helpers.encoding import HIDDEN_SIZE, HIDDEN_SIZE_2
from helpers.phase_training import SIDE, small_unet
from torch.utils._pytree import tree_leaves

from latentcache.phases.phases import Phases

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
