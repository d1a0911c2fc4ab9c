"""The requesting device, and where tensors go."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module

from latentcache.devices.placement import device_named, device_of, dtype_of, placed
from latentcache.errors import DeviceError
from latentcache.models.tiny import tiny_denoiser


def test_a_device_its_name_a_tensor_and_a_module_ask_alike() -> None:
    cpu = torch.device("cpu")
    for requester in ("cpu", cpu, torch.zeros(1), torch.nn.Linear(1, 1)):
        assert device_of(requester) == cpu


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "", "meta"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(DeviceError, match=f"device {name!r}"):
        device_named(name)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceError, match="'cuda' is not available here; there is only the CPU"):
        device_named("cuda")


def test_each_rank_has_its_own_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert device_named("auto", 1) == torch.device("cuda:1")
    assert device_named("cuda", 0) == torch.device("cuda:0")
    assert device_named("cuda:0", 1) == torch.device("cuda:0"), "a number that is given wins"
    assert device_named("cpu", 1) == torch.device("cpu")
    with pytest.raises(DeviceError, match="cuda:2 does not exist: this machine has 2"):
        device_named("auto", 2)


def test_dtype_follows_the_requester() -> None:
    assert dtype_of(torch.nn.Linear(1, 1).half()) == torch.float16
    assert dtype_of(torch.zeros(1, dtype=torch.bfloat16)) == torch.bfloat16
    assert dtype_of(torch.zeros(1, dtype=torch.int64)) is None
    assert dtype_of("cpu") is None
    assert dtype_of(torch.nn.ReLU()) is None


def test_the_dtype_that_weights_are_only_stored_in_does_not_count() -> None:
    stored = torch.nn.Sequential(torch.nn.Linear(1, 1).to(torch.float8_e4m3fn), torch.nn.Linear(1, 1).bfloat16())
    assert dtype_of(stored) == torch.bfloat16
    assert dtype_of(stored[0]) is None and dtype_of(stored[0].weight) is None
    unet = tiny_denoiser()
    unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float16)
    assert dtype_of(unet) == torch.float16


def test_a_module_on_two_devices_names_a_tensor_of_each() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, device="meta"))
    with pytest.raises(DeviceError, match=r"0\.weight on cpu, 1\.weight on meta"):
        device_of(module)


def test_an_offloaded_module_asks_for_its_execution_device() -> None:
    module = torch.nn.Linear(1, 1)
    cpu_offload(module, execution_device=torch.device("cpu"))
    assert module.weight.device.type == "meta"
    assert device_of(module) == torch.device("cpu")
    remove_hook_from_module(module)


def test_placed_puts_back_device_and_every_training_flag() -> None:
    module = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(1, 1)).train()
    module[0].eval()
    weight = module[1].weight
    with pytest.raises(RuntimeError, match="inside"), placed(module, torch.device("cpu")) as inside:
        assert not any(part.training for part in inside.modules())
        raise RuntimeError("inside")
    assert [part.training for part in module.modules()] == [True, False, True]
    assert module[1].weight is weight


def test_a_module_that_does_not_fit_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(torch.nn.Linear):
        calls = 0

        def to(self, device: torch.device) -> torch.nn.Module:
            Large.calls += 1
            if Large.calls == 1:
                raise torch.OutOfMemoryError("injected")
            return self

    with pytest.raises(DeviceError, match="Large does not fit into the free memory of cpu"), placed(Large(1, 1), "cpu"):
        raise AssertionError("never inside")
    assert Large.calls == 2
