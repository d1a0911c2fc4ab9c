"""Devices by name with the releases of torch that the project declares: `torch.accelerator` has grown."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from latentcache.devices.placement import device_named
from latentcache.devices.rng import rng_state, set_rng_state
from latentcache.errors import DeviceError
from latentcache.utils.accelerator import current_accelerator


def uses_nothing() -> None:
    """What asks for the accelerator, on a machine without one."""
    assert device_named("auto") == torch.device("cpu")
    with pytest.raises(DeviceError, match="there is only the CPU"):
        device_named("xpu")
    set_rng_state(rng_state())
    assert current_accelerator(built_for=True) is None


def test_before_2_6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "accelerator")
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cpu"))
    uses_nothing()
    module = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("xpu"))
    assert device_named("auto") == torch.device("xpu", 0) and current_accelerator(built_for=True) == torch.device("xpu")
    module.is_available = lambda: False
    assert device_named("auto") == torch.device("cpu") and current_accelerator(built_for=True) == torch.device("xpu")


def test_2_6(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> torch.device:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", refuse)
    uses_nothing()
    module = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert device_named("auto") == torch.device("cpu") and current_accelerator(built_for=True) == torch.device("xpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert device_named("auto") == torch.device("xpu", 0)
