"""The audit where no second device is needed: `meta` and two-device logic are in tests/sim."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers.training_utils import EMAModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from latentcache.devices.audit import AuditReport, audit
from latentcache.errors import DeviceError, DeviceMismatchError


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def trained(net: torch.nn.Module, **flags: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **flags)
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return optimizer


def names(report: AuditReport, kind: str) -> list[str]:
    return [finding.path for finding in report.findings if finding.kind == kind]


@dataclass
class Batch:
    latents: torch.Tensor
    prompts: list[str]


def test_a_run_on_one_device_is_clean() -> None:
    net = model()
    report = audit(
        {
            "net": net,
            "optimizer": trained(net),
            "scaler": torch.amp.GradScaler("cpu"),
            "ema": EMAModel(net.parameters()),
            "batch": Batch(torch.zeros(2), ["a cat"]),
            "nested": {"a": [torch.zeros(1), None, 3]},
        },
        device="cpu",
        training={"net": True},
    )
    assert report.ok and not report.findings and not report.notes
    report.raise_for_errors()
    # 6 parameters with gradients, 3 buffers, 6 EMA shadows, 2 in batches, 3 state tensors for each parameter.
    assert report.num_tensors == 12 + 3 + 6 + 2 + 18


def test_meta_tensors_are_named_each() -> None:
    net = model()
    net[2] = torch.nn.Linear(4, 2, device="meta")
    net.register_buffer("table", torch.zeros(3, device="meta"))
    report = audit({"net": net})
    assert names(report, "meta") == ["net.table", "net.2.weight", "net.2.bias"]
    assert {finding.found for finding in report.errors} == {"meta"}


def test_orphans_and_parameters_that_are_never_stepped() -> None:
    net = model()
    optimizer = trained(net)
    net[2] = torch.nn.Linear(4, 2)
    report = audit({"net": net, "optimizer": optimizer})
    assert names(report, "orphan") == [
        "optimizer.param_groups.0.params.4",
        "optimizer.param_groups.0.params.5",
        "net.2.weight",
        "net.2.bias",
    ]
    assert [finding.level for finding in report.findings] == ["error", "error", "warning", "warning"]
    with pytest.raises(DeviceMismatchError, match="no module has it"):
        report.raise_for_errors()


def test_train_and_eval_flags_are_compared_by_submodule() -> None:
    net = model()
    net[1].eval()
    report = audit({"net": net}, training={"net": True})
    assert [(f.path, f.kind, f.found, f.expected) for f in report.errors] == [("net.1", "mode", "eval", "train")]
    assert audit({"net": net}, training={"net": True, "net.1": False}).ok
    assert names(audit({"net": net}, training={"net": False}), "mode") == ["net", "net.0", "net.2"]


@pytest.mark.parametrize("argument", ["device", "training"])
@pytest.mark.parametrize("key", ["unet", "net.9", "net2"])
def test_keys_that_name_nothing_are_refused(argument: str, key: str) -> None:
    value = {"device": "cpu", "training": True}[argument]
    with pytest.raises(DeviceError, match=key):
        audit({"net": model()}, **{argument: {key: value}})


def test_a_scaler_for_another_device_is_named() -> None:
    net = model()
    scaler = torch.amp.GradScaler("cpu")
    assert audit({"net": net, "scaler": scaler}).ok
    scaler.scale(torch.ones(1))
    assert audit({"net": net, "scaler": scaler}).ok
    scaler._scale = scaler._scale.to("meta")
    assert names(audit({"net": net, "scaler": scaler}), "scale") == ["scaler._scale"]
    scaler._enabled = False
    assert audit({"net": net, "scaler": scaler}).ok


def test_partitions_of_zero_3_are_left_alone() -> None:
    """DeepSpeed leaves an empty tensor on a device of its own, with the partition in `ds_tensor`."""
    net = model()
    for number, parameter in enumerate(net.parameters()):
        parameter.data = torch.empty(0)
        parameter.ds_id, parameter.ds_tensor = number, torch.zeros(4, device="meta")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(8))], lr=0.1)
    report = audit({"net": net, "optimizer": optimizer}, device="cpu")
    assert not report.findings
    assert report.notes == (
        "net: 6 left where they are, partitions of DeepSpeed ZeRO-3, empty between forwards (the first is 0.weight)",
    )


def test_shards_that_fsdp_offloads_are_left_alone() -> None:
    """A DTensor whose mesh is of another type than the CPU, on which its shard waits."""
    net = model()
    for parameter in net.parameters():
        parameter.device_mesh = SimpleNamespace(device_type="cuda")
    report = audit({"net": net}, device="cpu")
    assert not report.findings
    assert "shards that FSDP offloads to the CPU and gathers on cuda" in report.notes[0]


def test_fsdp_shards_are_audited_by_what_this_rank_holds() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = model()
        stale = torch.optim.AdamW(net.parameters(), lr=0.1)
        fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
        optimizer = trained(net)
        assert any(isinstance(value, DTensor) for value in optimizer.state[net[0].weight].values())
        report = audit({"net": net, "optimizer": optimizer}, device="cpu")
        assert not report.findings, report.to_text()
        assert len(names(audit({"net": net, "optimizer": stale}), "orphan")) == 6, "built before the shards"
    finally:
        dist.destroy_process_group()


def test_quantised_weights_are_noted_not_moved() -> None:
    class Params4bit(torch.nn.Parameter):
        __module__ = "bitsandbytes.nn.modules"

    net = model()
    net[0].weight = Params4bit(torch.zeros(4, 3, device="meta"), requires_grad=False)
    report = audit({"net": net}, device="cpu")
    assert not report.findings
    assert "a bitsandbytes Params4bit, which its package places (the first is 0.weight)" in report.notes[0]
