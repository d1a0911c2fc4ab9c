"""The audit without a second device. tests/checkpoints/test_fsdp.py audits shards in two processes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.training_utils import EMAModel

from latentcache.devices.audit import AuditReport, audit
from latentcache.errors import DeviceError, DeviceMismatchError


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def trained(net: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
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
    parts = {
        "net": net,
        "optimizer": trained(net),
        "scaler": torch.amp.GradScaler("cpu"),
        "ema": EMAModel(net.parameters()),
        "batch": Batch(torch.zeros(2), ["a cat"]),
        "nested": {"a": [torch.zeros(1), None, 3]},
    }
    report = audit(parts, device="cpu", training={"net": True})
    assert report.ok and not report.findings and not report.notes
    report.raise_for_errors()
    # 6 parameters with gradients, 3 buffers, 6 EMA shadows, 2 in batches, 3 state tensors for each parameter.
    assert report.num_tensors == 12 + 3 + 6 + 2 + 18
    with pytest.raises(DeviceError, match=r"part nested\.a\.3 is of type object"):
        audit({"nested": {"a": [None, None, None, object()]}})


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
    orphans = ["optimizer.param_groups.0.params.4", "optimizer.param_groups.0.params.5"]
    assert names(report, "orphan") == [*orphans, "net.2.weight", "net.2.bias"]
    assert [finding.level for finding in report.findings] == ["error", "error", "warning", "warning"]
    with pytest.raises(DeviceMismatchError, match="no module has it") as caught:
        report.raise_for_errors()
    assert (caught.value.module, caught.value.argument) == ("optimizer", "param_groups.0.params.4")
    assert report.to_text().endswith("tensors: 2 errors, 2 warnings")


def test_train_and_eval_flags_are_compared_by_submodule() -> None:
    net = model()
    net[1].eval()
    report = audit({"net": net}, training={"net": True})
    assert [(f.path, f.kind, f.found, f.expected) for f in report.errors] == [("net.1", "mode", "eval", "train")]
    assert audit({"net": net}, training={"net": True, "net.1": False}).ok
    assert names(audit({"net": net}, training={"net": False}), "mode") == ["net", "net.0", "net.2"]
    for key in ("unet", "net.9", "net2"):
        with pytest.raises(DeviceError, match=key):
            audit({"net": net}, training={key: True})
        with pytest.raises(DeviceError, match=key):
            audit({"net": net}, device={key: "cpu"})


def test_a_scaler_for_another_device_is_named() -> None:
    net, scaler = model(), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    assert audit({"net": net, "scaler": scaler}).ok
    scaler._scale = scaler._scale.to("meta")
    assert names(audit({"net": net, "scaler": scaler}), "scale") == ["scaler._scale"]
    scaler._enabled = False
    assert audit({"net": net, "scaler": scaler}).ok


# Tensors that other software places


class Params4bit(torch.nn.Parameter):
    __module__ = "bitsandbytes.nn.modules"


def partitioned_by_zero_3(net: torch.nn.Sequential) -> None:
    """DeepSpeed leaves an empty tensor, with the partition in `ds_tensor`, here on another device."""
    for number, parameter in enumerate(net.parameters()):
        parameter.data = torch.empty(0)
        parameter.ds_id, parameter.ds_tensor = number, torch.zeros(4, device="meta")


def offloaded_by_fsdp(net: torch.nn.Sequential) -> None:
    """A DTensor whose shard waits on the CPU, while its mesh is of another type."""
    for parameter in net.parameters():
        parameter.device_mesh = SimpleNamespace(device_type="cuda")


def quantised(net: torch.nn.Sequential) -> None:
    net[0].weight = Params4bit(torch.zeros(4, 3, device="meta"), requires_grad=False)


@pytest.mark.parametrize(
    ("manage", "note"),
    [
        (partitioned_by_zero_3, "6 left where they are, partitions of DeepSpeed ZeRO-3, empty between forwards"),
        (offloaded_by_fsdp, "6 left where they are, shards that FSDP offloads to the CPU and gathers on cuda"),
        (quantised, "1 left where they are, a bitsandbytes Params4bit, which its package places"),
    ],
)
def test_what_other_software_places_is_noted_and_no_error(manage: Any, note: str) -> None:
    net = model()
    manage(net)
    parts: dict[str, Any] = {"net": net}
    if manage is partitioned_by_zero_3:  # it steps its own copies, which do not count as orphans
        parts["optimizer"] = torch.optim.SGD([torch.nn.Parameter(torch.zeros(8))], lr=0.1)
    report = audit(parts, device="cpu")
    assert not report.findings and report.notes == (f"net: {note} (the first is 0.weight)",)
