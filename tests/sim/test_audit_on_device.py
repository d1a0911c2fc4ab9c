"""The audit against a second device."""

from __future__ import annotations

import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from diffusers.hooks import apply_group_offloading
from diffusers.training_utils import EMAModel

from latentcache.devices.audit import AuditReport, audit
from latentcache.models.tiny import tiny_denoiser, tiny_parts


def small(device: torch.device) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).to(device)


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    optimizer.zero_grad()
    net(torch.ones(5, 3, device=device) * torch.arange(5, device=device)[:, None]).square().sum().backward()
    optimizer.step()


def paths(report: AuditReport, level: str = "error") -> list[str]:
    return [finding.path for finding in report.findings if finding.level == level]


def test_each_tensor_of_an_encoder_is_found_alone(device: torch.device) -> None:
    encoder = tiny_parts()["text_encoder"].to(device)
    assert not audit({"encoder": encoder}, device=device).findings
    named = [*encoder.named_parameters(), *encoder.named_buffers()]
    for name, tensor in named:
        owner = encoder.get_submodule(name.rpartition(".")[0])
        moved = tensor.detach().cpu()
        leaf = name.rpartition(".")[2]
        if isinstance(tensor, torch.nn.Parameter):
            setattr(owner, leaf, torch.nn.Parameter(moved, requires_grad=False))
        else:
            setattr(owner, leaf, moved)
        assert paths(audit({"encoder": encoder})) == [f"encoder.{name}"]
        setattr(owner, leaf, tensor)
    assert any(isinstance(tensor, torch.nn.Parameter) for _, tensor in named)
    assert any(not isinstance(tensor, torch.nn.Parameter) for _, tensor in named), "buffers count"


def test_scalar_buffers_and_plain_attributes_are_warnings(device: torch.device) -> None:
    net = small(device)
    net[1].num_batches_tracked = net[1].num_batches_tracked.cpu()
    net[2].table = torch.zeros(3)
    report = audit({"net": net}, device=device)
    assert report.ok
    assert paths(report, "warning") == ["net.1.num_batches_tracked", "net.2.table"]
    net.train()(torch.randn(4, 3).to(device))


def test_a_training_step_of_the_tiny_denoiser_is_clean(device: torch.device) -> None:
    unet = tiny_denoiser().to(device)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(device.type)
    batch = {
        "sample": torch.zeros(1, 4, 8, 8, device=device),
        "timestep": torch.tensor(10),
        "encoder_hidden_states": torch.zeros(1, 77, 72, device=device),
        "added_cond_kwargs": {
            "text_embeds": torch.zeros(1, 40, device=device),
            "time_ids": torch.zeros(1, 6, device=device),
        },
    }
    scaler.scale(unet(**batch).sample.square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    parts = {"unet": unet, "optimizer": optimizer, "scaler": scaler, "batch": batch, "ema": EMAModel(unet.parameters())}
    report = audit(parts, device=device, training={"unet": True})
    assert not report.findings, report.to_text()
    batch["added_cond_kwargs"]["text_embeds"] = torch.zeros(1, 40)
    parts["ema"].to("cpu")
    parts["scaler"] = torch.amp.GradScaler("cpu")
    report = audit(parts)
    assert {path.partition(".")[0] for path in paths(report)} == {"ema", "batch", "scaler"}
    assert "batch.added_cond_kwargs.text_embeds" in paths(report)


def test_parked_parts_have_a_device_of_their_own(device: torch.device) -> None:
    net, vae = small(device), small(torch.device("cpu"))
    assert audit({"net": net, "vae": vae}, device={"vae": "cpu"}).ok
    assert not audit({"net": net, "vae": vae}, device=device).ok
    assert not audit({"net": net, "vae": vae}, device={"vae": "cpu", "vae.2": device}).ok
    vae[2].to(device)
    assert audit({"net": net, "vae": vae}, device={"vae": "cpu", "vae.2": device}).ok
    assert paths(audit({"net": net, "vae": vae}, device={"vae": "cpu"})) == ["vae.2.weight", "vae.2.bias"]


def test_parked_optimizer_state(device: torch.device) -> None:
    net = small(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, amsgrad=True)
    net(torch.randn(5, 3, device=device)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        for key in state:
            state[key] = state[key].cpu()
    parts = {"net": net, "optimizer": optimizer}
    assert len(audit(parts, device=device).errors) == 6 * 3
    assert not audit(parts, device={"net": device, "optimizer": "cpu"}).findings


@torch.no_grad()
def test_offloaded_modules_are_at_home_where_their_hooks_put_them(device: torch.device) -> None:
    cpu_offloaded, hook = cpu_offload_with_hook(small(torch.device("cpu")).eval(), execution_device=device)
    sequential = cpu_offload(small(torch.device("cpu")).eval(), execution_device=device)
    grouped = small(torch.device("cpu")).eval()
    apply_group_offloading(grouped, onload_device=device, offload_type="leaf_level")
    for net in (cpu_offloaded, sequential, grouped):
        for _ in range(2):
            report = audit({"net": net, "batch": torch.zeros(1, 3, device=device)})
            assert not report.findings, report.to_text()
            assert paths(audit({"net": net, "batch": torch.zeros(1, 3)})) == ["batch"]
            net(torch.zeros(1, 3, device=device))
    parked = audit({"net": cpu_offloaded}, device={"net": "cpu"})
    assert len(parked.errors) == len([*cpu_offloaded.parameters(), *cpu_offloaded.buffers()]), "it is loaded still"
    hook.offload()
    assert not audit({"net": cpu_offloaded}, device={"net": "cpu"}).findings
