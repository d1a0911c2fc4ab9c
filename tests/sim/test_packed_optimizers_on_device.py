"""Optimizers with tensors inside plain objects of their state: named by the audit, and moved in every way to resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.optimizer_steps import train
from helpers.packed_optimizers import MaskedMomentum, Packed, PackedMomentum

from latentcache import audit, load_optimizer_state, repair_optimizer

KINDS = {"masked": (MaskedMomentum, "rates"), "packed": (PackedMomentum, "momentum.0")}
CPU = torch.device("cpu")


def built(kind: type[torch.optim.Optimizer], device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).to(device)
    return model, kind(model.parameters())


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
@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_run_equals_one_that_was_not_interrupted(name: str, way: str, device: torch.device) -> None:
    kind, state_name = KINDS[name]
    expected, optimizer = built(kind, device)
    train(expected, optimizer, range(3), device)
    weights, state = on_cpu(dict(expected.state_dict())), on_cpu(optimizer.state_dict())
    train(expected, optimizer, range(3, 6), device)

    model, optimizer = built(kind, CPU if way == "before the move" else device)
    model.load_state_dict(weights)
    if way == "load_optimizer_state":
        load_optimizer_state(optimizer, state)
    else:
        optimizer.load_state_dict(state)
        model.to(device)
        report = audit({"model": model, "optimizer": optimizer}, device=device)
        names = [f"optimizer.model.{param}.{state_name}.codes" for param in weights]
        assert [finding.path for finding in report.errors if "codes" in finding.name] == names
        moved = repair_optimizer(optimizer).moved
        assert {str(each.moved_to) for each in moved} == {str(device)}
        assert [each.name.partition(": ")[2] for each in moved if "codes" in each.name] == [f"{state_name}.codes"] * 4
    report = audit({"model": model, "optimizer": optimizer}, device=device)
    assert not report.findings and report.num_tensors == 4 + 4 * (2 if name == "masked" else 1)
    assert repair_optimizer(optimizer).moved == ()
    train(model, optimizer, range(3, 6), device)
    for got, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(got, wanted)
