"""Devices by name with the releases of torch that the project declares: `torch.accelerator` has grown."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from latentcache.devices.placement import current_accelerator, device_named
from latentcache.errors import DeviceError

XPU = torch.device("xpu")


@pytest.mark.parametrize("release", ["before 2.6", "2.6"])
def test_an_accelerator_is_found_if_it_is_there(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    has_device = False

    def accelerator() -> torch.device:
        if not is_built and release == "2.6":
            raise RuntimeError("Cannot access accelerator device when none is available.")
        return XPU if is_built else torch.device("cpu")

    if release == "2.6":
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_device)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", accelerator)
    else:
        monkeypatch.delattr(torch, "accelerator")
        monkeypatch.setattr(torch._C, "_get_accelerator", accelerator)
    module = SimpleNamespace(is_available=lambda: has_device, device_count=lambda: 1)
    is_built = False
    assert device_named("auto") == torch.device("cpu") and current_accelerator(built_for=True) is None
    with pytest.raises(DeviceError, match="there is only the CPU"):
        device_named("xpu")
    is_built = True
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert device_named("auto") == torch.device("cpu") and current_accelerator(built_for=True) == XPU
    has_device = True
    assert device_named("auto") == torch.device("xpu", 0)
