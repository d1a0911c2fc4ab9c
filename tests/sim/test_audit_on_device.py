"""The audit against a second device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from diffusers.hooks import apply_group_offloading
from diffusers.training_utils import EMAModel

from latentcache.devices.audit import AuditReport, audit
from latentcache.devices.guard import guard

CPU = torch.device("cpu")


def small(device: torch.device) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).to(device)


def paths(report: AuditReport, level: str = "error") -> list[str]:
    return [finding.path for finding in report.findings if finding.level == level]


def test_scalar_buffers_and_plain_attributes_are_warnings(device: torch.device) -> None:
    net = small(device)
    net[1].num_batches_tracked = net[1].num_batches_tracked.cpu()
    net[2].table = torch.zeros(3)
    report = audit({"net": net}, device=device)
    assert report.ok
    assert paths(report, "warning") == ["net.1.num_batches_tracked", "net.2.table"]
    net.train()(torch.randn(4, 3).to(device))
    net[1].running_mean = net[1].running_mean.cpu()
    assert paths(audit({"net": net})) == ["net.1.running_mean"]


def test_a_training_step_is_clean_and_what_belongs_to_it_is_named(device: torch.device) -> None:
    net, scaler = small(device), torch.amp.GradScaler(device.type)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, amsgrad=True)
    scaler.scale(net(torch.randn(5, 3, device=device)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    batch: dict[str, Any] = {"timestep": torch.tensor(10), "cond": {"embeds": torch.zeros(1, device=device)}}
    parts = {"net": net, "optimizer": optimizer, "scaler": scaler, "batch": batch, "ema": EMAModel(net.parameters())}
    report = audit(parts, device=device, training={"net": True})
    assert not report.findings, report.to_text()
    batch["cond"]["embeds"] = torch.zeros(1)
    parts["ema"].to("cpu")
    parts["scaler"] = torch.amp.GradScaler("cpu")
    found = paths(audit(parts))
    assert {path.partition(".")[0] for path in found} == {"ema", "batch", "scaler"}
    assert "batch.cond.embeds" in found
    for state in optimizer.state.values():
        state.update({key: value.cpu() for key, value in state.items()})
    parts = {"net": net, "optimizer": optimizer}
    assert len(audit(parts, device=device).errors) == 6 * 3
    assert not audit(parts, device={"net": device, "optimizer": "cpu"}).findings, "parked state"


def test_parked_parts_have_a_device_of_their_own(device: torch.device) -> None:
    parts = {"net": small(device), "vae": small(CPU)}
    assert audit(parts, device={"vae": "cpu"}).ok
    assert not audit(parts, device=device).ok
    parts["vae"][2].to(device)
    assert audit(parts, device={"vae": "cpu", "vae.2": device}).ok
    assert paths(audit(parts, device={"vae": "cpu"})) == ["vae.2.weight", "vae.2.bias"]


def test_a_number_on_the_device_does_not_go_with_tensors_on_the_cpu(device: torch.device) -> None:
    """deepspeedai/DeepSpeed #5422, OpenBMB/MiniCPM-V #246: an offloaded gradient times a scale on the device."""
    gradient, total_norm = torch.ones(8), torch.tensor(5.0, device=device)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        gradient.mul_(1.0 / total_norm)
    report = audit({"gradient": gradient, "total_norm": total_norm})
    assert [(finding.path, finding.found) for finding in report.errors] == [("total_norm", str(device))]
    # What DeepSpeed 0.14.3 does. The rule is not symmetric: a number on the CPU goes with tensors anywhere.
    for where in (CPU, device):
        assert audit({"gradient": gradient.to(where), "total_norm": total_norm.cpu()}, device=where).findings == ()
    gradient.mul_(1.0 / total_norm.cpu())


@torch.no_grad()
def test_offloaded_modules_are_at_home_where_their_hooks_put_them(device: torch.device) -> None:
    cpu_offloaded, hook = cpu_offload_with_hook(small(CPU).eval(), execution_device=device)
    sequential = cpu_offload(small(CPU).eval(), execution_device=device)
    grouped = small(CPU).eval()
    apply_group_offloading(grouped, onload_device=device, offload_type="leaf_level")
    for net in (cpu_offloaded, sequential, grouped):
        for _ in range(2):
            report = audit({"net": net, "batch": torch.zeros(1, 3, device=device)})
            assert not report.findings, report.to_text()
            assert paths(audit({"net": net, "batch": torch.zeros(1, 3)})) == ["batch"]
            with guard(net):
                net(torch.zeros(1, 3, device=device))
    if torch.get_device_module(device).device_count() > 1:
        other = torch.device(device.type, 1)
        wrong = [each for each in audit({"net": sequential}, device=other).errors if each.kind == "hook"]
        assert [(each.found, each.expected) for each in wrong] == [(str(device), str(other))]
    parked = audit({"net": cpu_offloaded}, device={"net": "cpu"})
    assert len(parked.errors) == len([*cpu_offloaded.parameters(), *cpu_offloaded.buffers()]), "it is loaded still"
    hook.offload()
    assert not audit({"net": cpu_offloaded}, device={"net": "cpu"}).findings
