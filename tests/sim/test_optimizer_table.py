"""torch's optimizers under every flag: misplaced state fails, the audit says so, and a repair puts it right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.optimizer_steps import train
from torch.utils._pytree import tree_map_only

from latentcache.devices.audit import audit
from latentcache.devices.optimizer import FLAGS, repair_optimizer, state_rule, state_tensors

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
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
    "fused": {"fused": True},
    "capturable": {"capturable": True, "foreach": True},
    "capturable-loop": {"capturable": True, "foreach": False},
}


def taken(name: str, flags: dict[str, bool]) -> bool:
    """Whether this optimizer has these flags (foreach of Adafactor and Muon is for CUDA only or not there)."""
    kind = getattr(torch.optim, name, None)
    if kind is None:
        return False
    try:
        kind([torch.nn.Parameter(torch.zeros(2, 2))], **OPTIMIZERS[name], **flags)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


CASES = [(name, setting) for name in OPTIMIZERS for setting, flags in SETTINGS.items() if taken(name, flags)]


def built(name: str, setting: str, device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    # Two dimensions each: Muon takes no others.
    model = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Tanh(), torch.nn.Linear(6, 2, bias=False))
    model.to(device)
    kind = getattr(torch.optim, name)
    return model, kind(model.parameters(), lr=0.01, **OPTIMIZERS[name], **SETTINGS[setting])


def misplaced(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    for state in state_tensors(optimizer):
        rule = state_rule(state)
        if rule.device not in (None, state.value.device):
            yield f"{state.name} on {state.value.device}: {rule.reason}"


def saved_state(name: str, setting: str, device: torch.device) -> tuple[Any, Any]:
    """The state_dicts of a run of three steps on the device, as `torch.load(..., map_location="cpu")` gives them."""
    model, optimizer = built(name, setting, device)
    train(model, optimizer, range(3), device)
    return tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), (model.state_dict(), optimizer.state_dict()))


def loaded_too_early(name: str, setting: str, device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """An optimizer whose state was loaded while the model was on the CPU; the model has moved since."""
    weights, state = saved_state(name, setting, device)
    model, optimizer = built(name, setting, torch.device("cpu"))
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    model.to(device)
    return model, optimizer


def syncs_of_a_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, host_syncs: Callable[[], Any]
) -> int:
    with host_syncs() as count:
        train(model, optimizer, range(3, 4), device)
    return count.num


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_state_loaded_before_the_move_fails_until_it_is_repaired(
    name: str, setting: str, device: torch.device, host_syncs: Callable[[], Any]
) -> None:
    model, optimizer = loaded_too_early(name, setting, device)
    flags = [{flag: group.get(flag) for flag in FLAGS} for group in optimizer.param_groups]
    with pytest.raises((RuntimeError, AssertionError), match=r"device|capturable"):
        train(model, optimizer, range(3, 4), device)
    optimizer.zero_grad()
    # The failed step may have counted: start from the same state again.
    model, optimizer = loaded_too_early(name, setting, device)

    report = repair_optimizer(optimizer)

    assert report.moved and all(moved.endswith(f"-> {device}") for moved in report.moved)
    assert list(misplaced(optimizer)) == []
    assert [{flag: group.get(flag) for flag in FLAGS} for group in optimizer.param_groups] == flags
    fresh_model, fresh = built(name, setting, device)
    train(fresh_model, fresh, range(3), device)
    expected_syncs = syncs_of_a_step(fresh_model, fresh, device, host_syncs)
    num_syncs = syncs_of_a_step(model, optimizer, device, host_syncs)
    # Fewer are fine: a fresh ASGD keeps `step` on the device, a loaded one need not.
    assert num_syncs <= expected_syncs
    for got, expected in zip(model.parameters(), fresh_model.parameters(), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_torch_judges_each_misplaced_state(name: str, setting: str, device: torch.device) -> None:
    """Each state tensor alone is moved to the other device: the step fails exactly where the audit says error."""

    def stepped() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = built(name, setting, device)
        train(model, optimizer, range(2), device)
        return model, optimizer

    model, optimizer = stepped()
    tensors = [key for key, value in optimizer.state[model[2].weight].items() if isinstance(value, torch.Tensor)]
    assert tensors
    for key in tensors:
        model, optimizer = stepped()
        state = optimizer.state[model[2].weight]
        state[key] = state[key].to("cpu" if state[key].device == device else device)
        report = audit({"net": model, "optimizer": optimizer}, device=device)
        try:
            train(model, optimizer, range(2, 3), device)
        except (RuntimeError, AssertionError):
            assert [each.path for each in report.errors] == [f"optimizer.net.2.weight.{key}"], f"{key}: the step fails"
        else:
            assert report.ok, f"{key}: the step runs, but {report.to_text()}"
