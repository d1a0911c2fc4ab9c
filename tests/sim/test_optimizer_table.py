"""torch's optimizers under every flag: misplaced state fails, the audit reports it, and a repair fixes it.

The last test has two problems that people reported. The others are in test_scenes.py and test_cold_cache.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from latentcache.devices.audit import audit
from latentcache.devices.optimizer import FLAGS, repair_optimizer, state_tensors

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"amsgrad": True},
    "NAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adafactor": {},
    "Adagrad": {},
    "ASGD": {"t0": 0},  # averages from the start: before, its loop only copies `ax`, which no device forbids
    "SGD": {"momentum": 0.9},
    "Muon": {},
}
"""One optimizer per kind of state; the others have a `step` and moments, like AdamW."""
SETTINGS: dict[str, dict[str, bool]] = {
    "default": {},
    "fused": {"fused": True},
    "capturable": {"capturable": True, "foreach": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
    "capturable-loop": {"capturable": True, "foreach": False},
}
FOR_ALL = ("default", "fused", "capturable")
"""The settings that decide where state belongs; the others are tried with AdamW only."""


def taken(name: str, flags: dict[str, bool]) -> bool:
    """Whether this torch has the optimizer with these flags."""
    try:
        getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(2, 2))], **OPTIMIZERS[name], **flags)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False
    return True


CASES = [
    (name, setting)
    for name in OPTIMIZERS
    for setting, flags in SETTINGS.items()
    if (name == "AdamW" or setting in FOR_ALL) and taken(name, flags)
]


def built(name: str, setting: str, device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer before the first step."""
    torch.manual_seed(3)
    # Muon accepts only parameters of two dimensions.
    model = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Tanh(), torch.nn.Linear(6, 2, bias=False))
    model.to(device)
    kind = getattr(torch.optim, name)
    return model, kind(model.parameters(), lr=0.01, **OPTIMIZERS[name], **SETTINGS[setting])


def trained(name: str, setting: str, device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after two steps."""
    model, optimizer = built(name, setting, device)
    train(model, optimizer, range(2), device)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range, device: torch.device) -> None:
    for step in steps:
        inputs = torch.linspace(-1, 1, 12).reshape(3, 4) * (step + 1)
        model(inputs.to(device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_torch_judges_misplaced_state_and_a_repair_continues(name: str, setting: str, device: torch.device) -> None:
    """With a single state tensor on the other device, the step fails exactly if the audit reports an error."""
    fresh_model, fresh = trained(name, setting, device)
    for key in dict.fromkeys(state.key for state in state_tensors(fresh)):
        model, optimizer = trained(name, setting, device)
        state = optimizer.state[model[2].weight]
        state[key] = state[key].to("cpu" if state[key].device == device else device)
        report = audit({"net": model, "optimizer": optimizer}, device=device)
        try:
            train(model, optimizer, range(2, 3), device)
        except (RuntimeError, AssertionError):
            assert [each.path for each in report.errors] == [f"optimizer.net.2.weight.{key}"], f"{key}: the step fails"
        else:
            # On the device each use of `step` waits for it: the usual advice, to move every tensor, is wrong.
            waits = [f"optimizer.net.2.weight.{key}"] if key == "step" and name != "ASGD" else []
            assert report.ok, f"{key}: the step runs, but {report.to_text()}"
            assert [each.path for each in report.findings] == waits, key

    model, optimizer = trained(name, setting, device)
    for param, state in optimizer.state.items():  # as a load before `model.to(device)` leaves it
        optimizer.state[param] = tree_map_only(torch.Tensor, torch.Tensor.cpu, state)
    flags = [{flag: group.get(flag) for flag in FLAGS} for group in optimizer.param_groups]
    moved = repair_optimizer(optimizer).moved
    assert moved and all(each.endswith(f"-> {device}") for each in moved)
    assert all(each.rule.device in (None, each.value.device) for each in state_tensors(optimizer))
    assert [{flag: group.get(flag) for flag in FLAGS} for group in optimizer.param_groups] == flags
    for each_model, each in ((fresh_model, fresh), (model, optimizer)):
        train(each_model, each, range(2, 3), device)
    for got, expected in zip(model.parameters(), fresh_model.parameters(), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("setting", ["fused", "foreach", "capturable"])
def test_state_that_was_loaded_before_the_model_moved_fails_and_continues_after_a_repair(
    setting: str, device: torch.device, tmp_path: Path
) -> None:
    """FoundationVision/VAR #127 is the fused optimizer, rasbt/LLMs-from-scratch #232 the others."""
    expected = trained("AdamW", setting, device)
    states = [tree_map_only(torch.Tensor, torch.Tensor.cpu, part.state_dict()) for part in expected]
    torch.save(states, tmp_path / "checkpoint.pt")
    train(*expected, range(2, 5), device)

    def resumed() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = built("AdamW", setting, torch.device("cpu"))
        of_model, of_optimizer = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
        return model.to(device), optimizer

    # torch.optim itself checks capturable groups, with an assert.
    with pytest.raises((RuntimeError, AssertionError), match="device"):
        train(*resumed(), range(2, 3), device)
    model, optimizer = resumed()
    found = audit({"net": model, "optimizer": optimizer}, device=device)
    assert "optimizer.net.0.weight.exp_avg" in {finding.path for finding in found.errors}
    repair_optimizer(optimizer)
    assert audit({"net": model, "optimizer": optimizer}, device=device).findings == ()
    train(model, optimizer, range(2, 5), device)
    assert all(map(torch.equal, model.parameters(), expected[0].parameters()))
