"""torch's optimizers under every flag: misplaced state fails, the audit says so, and a repair puts it right.

FoundationVision/VAR #127 and rasbt/LLMs-from-scratch #232 are AdamW's: state that was loaded before the model moved.
"""

from __future__ import annotations

import copy
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
"""One of each kind of state: the others have a `step` and moments, as AdamW has."""
SETTINGS: dict[str, dict[str, bool]] = {
    "default": {},
    "fused": {"fused": True},
    "capturable": {"capturable": True, "foreach": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
    "capturable-loop": {"capturable": True, "foreach": False},
}
FOR_ALL = ("default", "fused", "capturable")
"""The settings that decide where state belongs. The others are for AdamW alone."""


def taken(name: str, flags: dict[str, bool]) -> bool:
    """Whether this optimizer is in this torch, and has these flags."""
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
Built = tuple[torch.nn.Module, torch.optim.Optimizer]


def built(name: str, setting: str, device: torch.device) -> Built:
    torch.manual_seed(3)
    # Two dimensions each: Muon takes no others.
    model = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Tanh(), torch.nn.Linear(6, 2, bias=False))
    model.to(device)
    kind = getattr(torch.optim, name)
    return model, kind(model.parameters(), lr=0.01, **OPTIMIZERS[name], **SETTINGS[setting])


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range, device: torch.device) -> None:
    for step in steps:
        inputs = torch.linspace(-1, 1, 12).reshape(3, 4) * (step + 1)
        model(inputs.to(device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_state_loaded_before_the_move_fails_until_it_is_repaired(name: str, setting: str, device: torch.device) -> None:
    fresh_model, fresh = built(name, setting, device)
    train(fresh_model, fresh, range(2), device)
    # As `torch.load(..., map_location="cpu")` gives them.
    weights, state = tree_map_only(
        torch.Tensor, lambda t: t.detach().to("cpu", copy=True), (fresh_model.state_dict(), fresh.state_dict())
    )

    def loaded_too_early() -> Built:
        """An optimizer whose state was loaded while the model was on the CPU; the model has moved since."""
        model, optimizer = built(name, setting, torch.device("cpu"))
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))  # torch takes over `step` as it is
        model.to(device)
        return model, optimizer

    with pytest.raises((RuntimeError, AssertionError), match=r"device|capturable"):
        train(*loaded_too_early(), range(2, 3), device)
    model, optimizer = loaded_too_early()
    flags = [{flag: group.get(flag) for flag in FLAGS} for group in optimizer.param_groups]
    report = repair_optimizer(optimizer)
    assert report.moved and all(moved.endswith(f"-> {device}") for moved in report.moved)
    for each in state_tensors(optimizer):
        assert each.rule.device in (None, each.value.device), each.name
    assert [{flag: group.get(flag) for flag in FLAGS} for group in optimizer.param_groups] == flags
    for each_model, each in ((fresh_model, fresh), (model, optimizer)):
        train(each_model, each, range(2, 3), device)
    for got, expected in zip(model.parameters(), fresh_model.parameters(), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_torch_judges_each_misplaced_state(name: str, setting: str, device: torch.device) -> None:
    """Each state tensor alone is moved to the other device: the step fails exactly where the audit says error."""
    model, optimizer = built(name, setting, device)
    train(model, optimizer, range(1), device)
    for key in dict.fromkeys(state.key for state in state_tensors(optimizer)):
        model, optimizer = built(name, setting, device)
        train(model, optimizer, range(2), device)
        state = optimizer.state[model[2].weight]
        state[key] = state[key].to("cpu" if state[key].device == device else device)
        report = audit({"net": model, "optimizer": optimizer}, device=device)
        try:
            train(model, optimizer, range(2, 3), device)
        except (RuntimeError, AssertionError):
            assert [each.path for each in report.errors] == [f"optimizer.net.2.weight.{key}"], f"{key}: the step fails"
        else:
            # The usual advice moves every tensor: then each use of `step` waits for the device.
            waits = [f"optimizer.net.2.weight.{key}"] if key == "step" and name != "ASGD" else []
            assert report.ok, f"{key}: the step runs, but {report.to_text()}"
            assert [each.path for each in report.findings] == waits, key
