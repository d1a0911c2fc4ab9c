"""Checkpoints on a second device: onto each part's device, with the flags of the caller's optimizer, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_run import Run, assert_same_bits

from latentcache.devices.optimizer import FLAGS, state_tensors

BUILT: dict[str, dict[str, Any]] = {
    "default": {},
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "capturable": {"capturable": True},
    "tensor-lr": {"capturable": True, "foreach": False, "lr": torch.tensor(0.5)},
}


def run_with(name: str, device: torch.device, **changes: Any) -> Run:
    flags = {key: value.to(device) if key == "lr" else value for key, value in BUILT[name].items()}
    return Run(device, **flags, **changes)


def state_devices(run: Run) -> set[tuple[str, str]]:
    return {(state.name, state.value.device.type) for state in state_tensors(run.optimizer)}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("saved", "saved_on", "built", "built_on"),
    [
        ("fused", "cpu", "fused", "device"),
        ("fused", "device", "fused", "device"),
        ("default", "device", "default", "device"),
        ("fused", "device", "default", "cpu"),
        ("default", "device", "fused", "device"),
        ("fused", "device", "capturable", "device"),
        ("capturable", "device", "foreach", "device"),
        ("tensor-lr", "device", "tensor-lr", "device"),
    ],
)
def test_flags_and_devices_stay_as_the_caller_built_them(
    saved: str, saved_on: str, built: str, built_on: str, device: torch.device, tmp_path: Path
) -> None:
    """VAR #127: the second run failed on `state_steps` because its flags did not match its state."""
    places = {"cpu": torch.device("cpu"), "device": device}
    first = run_with(saved, places[saved_on])
    first.train(2)
    first.save(tmp_path / "checkpoint")
    saved_tensors, saved_lr = first.tensors(), float(first.optimizer.param_groups[0]["lr"])
    expected = first.train(3)
    second = run_with(built, places[built_on], seed=5, weight_decay=0.25)
    group = second.optimizer.param_groups[0]
    addresses = [param.data_ptr() for param in second.model.parameters()]
    before, lr = {flag: group[flag] for flag in FLAGS}, group["lr"]
    second.load(tmp_path / "checkpoint")
    group = second.optimizer.param_groups[0]
    assert {flag: group[flag] for flag in FLAGS} == before
    assert group["weight_decay"] == first.optimizer.param_groups[0]["weight_decay"]
    assert group["lr"] is lr or not isinstance(lr, torch.Tensor), "a captured graph reads it from its address"
    assert float(group["lr"]) == pytest.approx(saved_lr)
    assert [param.data_ptr() for param in second.model.parameters()] == addresses
    assert_same_bits(second.tensors(), saved_tensors)
    assert {param.device for param in second.ema.shadow_params} == {places[built_on]}
    losses = second.train(3)
    if (saved, saved_on) == (built, built_on):  # otherwise the first run draws and rounds differently
        assert_same_bits(losses, expected)
        assert_same_bits(second.tensors(), first.tensors())
    fresh = run_with(built, places[built_on])
    fresh.train(1)
    assert state_devices(second) == state_devices(fresh)
