"""The guard: what it accepts, what it names, and that it leaves nothing installed.

`meta` stands in for a second device where no kernel runs; the rest is in tests/sim.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from latentcache.devices.guard import guard
from latentcache.errors import DeviceMismatchError


def hooks_of(module: torch.nn.Module) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    return [(dict(m._forward_pre_hooks), dict(m._forward_pre_hooks_with_kwargs)) for m in module.modules()]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(2, 2)
        self.act = torch.nn.ReLU()

    def forward(self, hidden_states: torch.Tensor, *more: torch.Tensor, cond: Any = None, **rest: Any) -> torch.Tensor:
        return self.act(self.proj(hidden_states))


def test_the_guard_names_module_and_argument_and_leaves_nothing_installed() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), Block())
    block, x, far = net[1], torch.zeros(1, 2), torch.zeros(1, 2, device="meta")
    block.register_forward_pre_hook(lambda module, args: None)
    before = hooks_of(net)
    wrong: list[tuple[Any, str, str]] = [
        (lambda: net(far), "", "input"),
        (lambda: block(far), "1", "hidden_states"),
        (lambda: block(x, x, far), "1", "more.1"),
        (lambda: block(x, cond={"embeds": [x, far]}), "1", "cond.embeds.1"),
        (lambda: block(x, other=far), "1", "other"),
    ]
    with pytest.raises(KeyboardInterrupt), guard(net):
        net(x)
        for call, module, argument in wrong:
            with pytest.raises(DeviceMismatchError, match=r"its (0\.weight|proj\.weight) is on cpu") as caught:
                call()
            error = caught.value
            assert (error.module, error.argument, error.found, error.expected) == (module, argument, "meta", "cpu")
            assert f"{argument} [1, 2] float32 is on meta" in str(error)
        with pytest.raises(TypeError, match=r"cond|hidden_states"):
            block()
        block(x, cond=torch.nn.Linear(1, 1, device="meta"))
        assert hooks_of(net) != before
        raise KeyboardInterrupt
    assert hooks_of(net) == before


def test_buffers_say_where_a_module_is_and_streamed_weights_do_not() -> None:
    class Streamed(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input + 1

    far, linear, norm = torch.zeros(3, 2, device="meta"), Streamed(2, 2), torch.nn.BatchNorm1d(2, affine=False)
    with guard(norm), pytest.raises(DeviceMismatchError, match="its running_mean is on cpu"):
        norm(far)
    with guard(linear), pytest.raises(DeviceMismatchError):
        linear(far)
    for parameter in linear.parameters():
        parameter.is_ramtorch = True
    with guard(linear):
        linear(far)
