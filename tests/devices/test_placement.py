"""Resolving the requesting device and its dtype, and moving modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload

from latentcache.devices.placement import device_named, device_of, dtype_of, placed
from latentcache.errors import DeviceError
from latentcache.models.tiny import tiny_denoiser

CPU = torch.device("cpu")
ON_META = torch.nn.Linear(1, 1, device="meta")


def test_a_device_its_name_a_tensor_and_a_module_ask_alike() -> None:
    offloaded = cpu_offload(torch.nn.Linear(1, 1), execution_device=CPU)
    assert offloaded.weight.device.type == "meta"
    for requester in ("cpu", CPU, torch.zeros(1), torch.nn.Linear(1, 1), offloaded):
        assert device_of(requester) == CPU


@pytest.mark.parametrize(
    ("requester", "message"),
    [
        ("gpu", "device 'gpu'"),
        ("meta", "device 'meta'"),
        (torch.zeros(1, device="meta"), "tensor is on meta"),
        (ON_META, r"Linear\.weight is on meta"),
        (torch.nn.ReLU(), "ReLU has no parameters"),
        (torch.nn.Sequential(torch.nn.Linear(1, 1), ON_META), r"is on 2 devices \(0\.weight on cpu, 1\.weight on meta"),
    ],
)
def test_what_names_no_device_is_refused(requester: Any, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        device_of(requester)


def test_each_rank_has_its_own_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert device_named("auto", 1) == torch.device("cuda:1")
    assert device_named("cuda", 0) == torch.device("cuda:0")
    assert device_named("cuda:0", 1) == torch.device("cuda:0"), "a number that is given wins"
    assert device_named("cpu", 1) == CPU
    with pytest.raises(DeviceError, match="cuda:2 does not exist: this machine has 2"):
        device_named("auto", 2)
    # SLURM and containers set CUDA_VISIBLE_DEVICES per rank: each rank's device then has index 0.
    module.device_count = lambda: 1
    assert device_named("cuda", 3) == torch.device("cuda:0")


def test_dtype_is_the_one_that_the_requester_computes_in() -> None:
    stored = torch.nn.Sequential(torch.nn.Linear(1, 1).to(torch.float8_e4m3fn), torch.nn.Linear(1, 1).bfloat16())
    unet = tiny_denoiser()
    unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float16)
    expected = [
        (torch.nn.Linear(1, 1).half(), torch.float16),
        (torch.zeros(1, dtype=torch.bfloat16), torch.bfloat16),
        (torch.zeros(1, dtype=torch.int64), None),
        ("cpu", None),
        (torch.nn.ReLU(), None),
        (stored, torch.bfloat16),  # its float8 weights are only stored
        (stored[0], None),
        (stored[0].weight, None),
        (unet, torch.float16),
    ]
    assert [dtype_of(requester) for requester, _ in expected] == [dtype for _, dtype in expected]


def test_placed_puts_back_device_and_every_training_flag() -> None:
    module = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(1, 1)).train()
    module[0].eval()
    weight = module[1].weight
    with pytest.raises(RuntimeError, match="inside"), placed(module, CPU) as inside:
        assert not any(part.training for part in inside.modules())
        raise RuntimeError("inside")
    assert [part.training for part in module.modules()] == [True, False, True]
    assert module[1].weight is weight


def test_a_module_that_does_not_fit_is_put_back() -> None:
    calls: list[torch.device] = []

    class Large(torch.nn.Linear):
        def to(self, device: torch.device) -> torch.nn.Module:
            calls.append(device)
            if len(calls) == 1:
                raise torch.OutOfMemoryError("injected")
            return self

    with pytest.raises(DeviceError, match="Large does not fit into the free memory of meta"):
        placed(Large(1, 1), torch.device("meta")).__enter__()
    assert calls == [torch.device("meta"), CPU]
