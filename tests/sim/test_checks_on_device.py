"""The audit, the guard and the doctor on a second device: the guard refuses what torch refuses, and only that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from diffusers.hooks import apply_group_offloading
from diffusers.training_utils import EMAModel
from helpers.tiny_models import tiny_pipeline

from latentcache.devices.audit import AuditReport, audit
from latentcache.devices.guard import guard
from latentcache.doctor import training_check
from latentcache.doctor.environment import diagnose
from latentcache.doctor.training_check import try_training
from latentcache.errors import DeviceMismatchError
from latentcache.models.tiny import tiny_denoiser

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
    with guard(sequential):
        sequential(torch.zeros(1, 3))  # its hook moves the inputs
    if torch.get_device_module(device).device_count() > 1:
        other = torch.device(device.type, 1)
        wrong = [each for each in audit({"net": sequential}, device=other).errors if each.kind == "hook"]
        assert [(each.found, each.expected) for each in wrong] == [(str(device), str(other))]
    parked = audit({"net": cpu_offloaded}, device={"net": "cpu"})
    assert len(parked.errors) == len([*cpu_offloaded.parameters(), *cpu_offloaded.buffers()]), "still on the device"
    hook.offload()
    assert not audit({"net": cpu_offloaded}, device={"net": "cpu"}).findings
    with guard(cpu_offloaded):
        assert cpu_offloaded(torch.zeros(1, 3)).device == device
        # The weights stay there now, and accelerate no longer moves the inputs.
        with pytest.raises(DeviceMismatchError, match="input"):
            cpu_offloaded(torch.zeros(1, 3))


def test_the_guard_lets_a_whole_pipeline_run(device: torch.device) -> None:
    pipe = tiny_pipeline().to(device)
    with guard(pipe.unet), guard(pipe.text_encoder), guard(pipe.text_encoder_2), guard(pipe.vae.decoder):
        images = pipe("a cat", num_inference_steps=1, height=32, width=32, output_type="pt").images
    assert images.device == device and bool(images.isfinite().all())


def test_a_model_split_over_devices_runs_under_the_guard(device: torch.device) -> None:
    class Split(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(2, 2).to(device), torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).cpu())

    with guard(Split()) as split:
        assert split(torch.zeros(1, 2, device=device)).device.type == "cpu"


def test_the_device_is_listed_and_named(device: torch.device) -> None:
    found = diagnose(device=str(device))
    assert found.facts["device"] == str(device)
    [state] = [each for each in found.facts["devices"] if each["device"] == str(device)]
    assert state["name"] and state["dtypes"] == ["bfloat16", "float16"]
    assert state["free_bytes"] is None or 0 < state["free_bytes"] <= state["total_bytes"]
    assert {finding.level for finding in found.findings if finding.subject == str(device)} <= {"ok", "note"}


def test_one_step_audits_clean_and_a_model_that_was_not_moved_is_an_error(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = try_training(device)
    assert found.ok and [finding.level for finding in found.findings] == ["ok"]
    training = found.facts["training"]
    assert training["device"] == str(device) and training["audit"]["findings"] == ()
    on_cpu = try_training(torch.device("cpu")).facts["training"]
    assert training["loss"] == pytest.approx(on_cpu["loss"], rel=1e-3)

    denoiser = tiny_denoiser()
    denoiser.to = lambda _: denoiser
    monkeypatch.setattr(training_check, "tiny_denoiser", lambda: denoiser)
    (finding,) = try_training(device).findings
    assert finding.level == "error" and str(device) in finding.found and "cpu" in finding.found
    assert "same device" in finding.found
