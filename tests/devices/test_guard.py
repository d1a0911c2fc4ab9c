"""Checks before the kernel: what they accept, what they name, and that they leave nothing installed.

`meta` stands in for the second device where the kernel is never reached; tests/sim runs the others.
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


def test_the_guard_names_module_and_argument() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), Block())
    block, x, far = net[1], torch.zeros(1, 2), torch.zeros(1, 2, device="meta")
    with guard(net):
        net(x)
        with pytest.raises(DeviceMismatchError, match=r"Sequential: its 0\.weight is on cpu") as root:
            net(far)
        with pytest.raises(DeviceMismatchError, match=r"1 \(Block\)") as first:
            block(far)
        with pytest.raises(DeviceMismatchError) as extra:
            block(x, x, far)
        with pytest.raises(DeviceMismatchError) as nested:
            block(x, cond={"embeds": [x, far]})
        with pytest.raises(DeviceMismatchError) as keyword:
            block(x, other=far)
        with pytest.raises(TypeError, match=r"cond|hidden_states"):
            block()
        block(x, cond=torch.nn.Linear(1, 1, device="meta"))
    errors = [caught.value for caught in (root, first, extra, nested, keyword)]
    assert [error.module for error in errors] == ["", "1", "1", "1", "1"]
    assert [e.argument for e in errors] == ["input", "hidden_states", "more.1", "cond.embeds.1", "other"]
    assert {(error.found, error.expected) for error in errors} == {("meta", "cpu")}


def test_buffers_say_where_a_module_is_too() -> None:
    norm = torch.nn.BatchNorm1d(2, affine=False)
    with guard(norm), pytest.raises(DeviceMismatchError, match="its running_mean is on cpu"):
        norm(torch.zeros(3, 2, device="meta"))


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_installed(fails: bool) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), Block())
    own = net[1].register_forward_pre_hook(lambda module, args: None)
    before = hooks_of(net)
    try:
        with guard(net):
            assert hooks_of(net) != before
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert hooks_of(net) == before
    net(torch.zeros(1, 2))
    own.remove()


def test_streamed_weights_decide_nothing() -> None:
    class Streamed(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input + 1

    far = torch.zeros(1, 2, device="meta")
    linear = Streamed(2, 2)
    with guard(linear), pytest.raises(DeviceMismatchError):
        linear(far)
    for parameter in linear.parameters():
        parameter.is_ramtorch = True
    with guard(linear):
        linear(far)
