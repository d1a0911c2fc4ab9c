"""Checkpoints on a second device: bit-identical, onto the device of each part, with the flags of who built it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.training_run import Run, assert_same_bits

from latentcache.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from latentcache.devices.optimizer import state_tensors

FLAGS = {
    "default": {},
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "capturable": {"capturable": True},
    "tensor-lr": {"capturable": True, "foreach": False},
}


def run_with(name: str, device: torch.device, **changes: object) -> Run:
    flags = dict(FLAGS[name])
    if name == "tensor-lr":
        flags["lr"] = torch.tensor(0.05, device=device)
    return Run(device, **flags, **changes)


def state_devices(run: Run) -> set[tuple[str, str]]:
    return {(state.name, state.value.device.type) for state in state_tensors(run.optimizer)}


@pytest.mark.parametrize("flags", FLAGS)
def test_resumes_bit_identically(flags: str, device: torch.device, tmp_path: Path) -> None:
    whole = run_with(flags, device)
    whole_losses = whole.train(6)
    expected = whole.numbers()

    first = run_with(flags, device)
    losses = first.train(3)
    first.save(tmp_path / "checkpoint", step=3)
    second = run_with(flags, device, seed=99)
    addresses = [param.data_ptr() for param in second.model.parameters()]
    assert second.load(tmp_path / "checkpoint").step == 3
    losses += second.train(3)

    assert_same_bits(losses, whole_losses)
    assert_same_bits(second.tensors(), whole.tensors())
    assert second.numbers() == expected
    assert [param.data_ptr() for param in second.model.parameters()] == addresses
    assert state_devices(second) == state_devices(whole)


@pytest.mark.parametrize("direction", ["to the device", "from the device"])
@pytest.mark.parametrize("flags", ["default", "fused", "foreach"])
def test_saved_on_one_device_loads_on_another(direction: str, flags: str, device: torch.device, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    source, target = (cpu, device) if direction == "to the device" else (device, cpu)
    saved = run_with(flags, source)
    saved.train(2)
    saved.save(tmp_path / "checkpoint")

    loaded = run_with(flags, target, seed=5)
    loaded.load(tmp_path / "checkpoint")

    assert_same_bits(loaded.tensors(), saved.tensors())
    assert {param.device for param in loaded.ema.shadow_params} == {target}
    fresh = run_with(flags, target)
    fresh.train(1)
    assert state_devices(loaded) == state_devices(fresh)
    loaded.train(2)


@pytest.mark.parametrize("built", ["default", "fused", "foreach", "capturable"])
@pytest.mark.parametrize("saved", ["default", "fused", "capturable"])
def test_flags_stay_as_the_caller_built_them(saved: str, built: str, device: torch.device, tmp_path: Path) -> None:
    """VAR #127: the second run failed on `state_steps` because flags and state did not fit each other."""
    first = run_with(saved, device)
    first.train(2)
    first.save(tmp_path / "checkpoint")
    second = run_with(built, device, lr=0.5, weight_decay=0.25)
    before = {flag: second.optimizer.param_groups[0][flag] for flag in ("fused", "foreach", "capturable")}
    second.load(tmp_path / "checkpoint")
    group = second.optimizer.param_groups[0]
    assert {flag: group[flag] for flag in before} == before
    assert group["lr"] == first.optimizer.param_groups[0]["lr"]
    assert group["weight_decay"] == first.optimizer.param_groups[0]["weight_decay"]
    second.train(1)
    fresh = run_with(built, device)
    fresh.train(1)
    assert state_devices(second) == state_devices(fresh)


def test_a_model_that_is_split_over_devices_loads_where_each_part_is(device: torch.device, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    save_checkpoint(tmp_path / "checkpoint", model=model)
    expected = [param.clone() for param in model.parameters()]
    other = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).to(device))
    load_checkpoint(tmp_path / "checkpoint", model=other)
    assert [param.device.type for param in other.parameters()] == ["cpu", "cpu", device.type, device.type]
    assert_same_bits([param.detach().cpu() for param in other.parameters()], [w.detach() for w in expected])
