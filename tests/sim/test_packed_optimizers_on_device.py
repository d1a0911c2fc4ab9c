"""Optimizer state with tensors inside plain objects, as 8-bit optimizers have it: torch moves none of these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.optimizer_steps import train

from latentcache import audit, load_optimizer_state, repair_optimizer

CPU = torch.device("cpu")


class Packed:
    """Values as int8 codes and one scale: an object of no tensor class, with a tensor inside."""

    def __init__(self, values: torch.Tensor | dict[str, Any]):
        if isinstance(values, dict):
            self.codes, self.scale = values["codes"], values["scale"]
            return
        self.scale = max(values.abs().max().item(), 1e-12) / 127
        self.codes = (values / self.scale).round().to(torch.int8)

    def values(self) -> torch.Tensor:
        return self.codes.float() * self.scale


class PackedMomentum(torch.optim.Optimizer):
    """All state in objects, which are in its state_dict as they are."""

    def __init__(self, params: Any, lr: float = 0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                before = state["momentum"][0].values() * 0.9 if state else 0.0
                momentum = param.grad + before
                param.sub_(group["lr"] * momentum)
                state["momentum"] = [Packed(momentum)]


def built(device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).to(device)
    return model, PackedMomentum(model.parameters())


def on_cpu(value: Any) -> Any:
    """As `torch.load(..., map_location="cpu")` gives it, objects included."""
    if isinstance(value, Packed):
        return Packed(on_cpu(vars(value)))
    if isinstance(value, dict):
        return {key: on_cpu(each) for key, each in value.items()}
    if isinstance(value, list):
        return [on_cpu(each) for each in value]
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("way", ["its own load", "load_optimizer_state", "before the move"])
def test_a_resumed_run_equals_one_that_was_not_interrupted(way: str, device: torch.device) -> None:
    expected, optimizer = built(device)
    train(expected, optimizer, range(3), device)
    weights, state = on_cpu(dict(expected.state_dict())), on_cpu(optimizer.state_dict())
    train(expected, optimizer, range(3, 6), device)

    model, optimizer = built(CPU if way == "before the move" else device)
    model.load_state_dict(weights)
    if way == "load_optimizer_state":
        load_optimizer_state(optimizer, state)
    else:
        optimizer.load_state_dict(state)
        model.to(device)
        report = audit({"model": model, "optimizer": optimizer}, device=device)
        names = [f"optimizer.model.{param}.momentum.0.codes" for param in weights]
        assert [finding.path for finding in report.errors if "codes" in finding.name] == names
        moved = repair_optimizer(optimizer).moved
        assert {str(each.moved_to) for each in moved} == {str(device)}
        assert [each.name.partition(": ")[2] for each in moved if "codes" in each.name] == ["momentum.0.codes"] * 4
    report = audit({"model": model, "optimizer": optimizer}, device=device)
    assert not report.findings and report.num_tensors == 4 + 4
    assert repair_optimizer(optimizer).moved == ()
    train(model, optimizer, range(3, 6), device)
    for got, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(got, wanted)
