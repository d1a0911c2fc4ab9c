"""Four device mismatches that people reported: first plain PyTorch fails, then this project's answer works.

Assertions that fail for the usual, wrong remedies check the answers to the first. test_cold_cache.py has a fifth case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map_only

from latentcache.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from latentcache.devices.audit import audit
from latentcache.devices.guard import guard
from latentcache.devices.optimizer import repair_optimizer
from latentcache.errors import DeviceMismatchError

CPU = torch.device("cpu")
MISMATCH = "Expected all tensors to be on the same device"


@dataclass
class Run:
    """A small training run: model, optimizer and GradScaler, with noise from the device's own random stream."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    device: torch.device

    def step(self) -> float:
        noise = torch.randn(4, 6, device=self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = torch.nn.functional.mse_loss(self.model(noise), noise[:, :3])
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    def parts(self) -> dict:
        return {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}

    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().cpu().flatten() for parameter in self.model.parameters()])


def built(device: torch.device, *, model_on: torch.device | None = None, **flags: object) -> Run:
    """New objects, as in a new process. With `model_on` CPU the script has not called `model.to(device)` yet."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 3)]
    model = torch.nn.Sequential(*layers).to(model_on or device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **flags)
    return Run(model, optimizer, torch.amp.GradScaler(device.type, init_scale=1024.0), device)


def saved_run(device: torch.device, path: Path, **flags: object) -> tuple[Path, torch.Tensor, list[float]]:
    """Three steps, a checkpoint, three more steps. Returns the plain checkpoint, and the final weights and losses."""
    run = built(device, **flags)
    losses = [run.step() for _ in range(3)]
    save_checkpoint(path / "ours", **run.parts(), step=3)
    states = {name: part.state_dict() for name, part in run.parts().items()}
    states["rng"] = torch.get_device_module(device).get_rng_state(device)
    torch.save(tree_map_only(torch.Tensor, torch.Tensor.cpu, states), path / "plain.pt")
    losses += [run.step() for _ in range(3)]
    return path / "plain.pt", run.weights(), losses


def resumed(device: torch.device, path: Path, **flags: object) -> Run:
    """A resume that loads while the model is on the CPU, and only then moves it."""
    file = torch.load(path, weights_only=True)
    run = built(device, model_on=CPU, **flags)
    for name, part in run.parts().items():
        part.load_state_dict(file[name])
    run.model.to(device)
    torch.get_device_module(device).set_rng_state(file["rng"], device)
    return run


def move_everything(optimizer: torch.optim.Optimizer) -> None:
    """The usual advice, which is wrong for `step`."""
    for param, state in optimizer.state.items():
        state.update({k: v.to(param.device) for k, v in state.items() if isinstance(v, torch.Tensor)})


def move_moments_only(optimizer: torch.optim.Optimizer) -> None:
    """What `Optimizer.load_state_dict` did up to torch 2.0: `step` stays where the file was loaded."""
    for param, state in optimizer.state.items():
        state.update({k: v.to(param.device) for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()})


def assert_continues(run: Run, weights: torch.Tensor, losses: list[float]) -> None:
    """The audit is clean, so no step waits for the device, and all bits are equal."""
    assert audit(run.parts(), device=run.device).findings == ()
    assert [run.step() for _ in range(3)] == losses[-3:]
    assert torch.equal(run.weights(), weights)


# Scene 1: FoundationVision/VAR #127, https://github.com/FoundationVision/VAR/issues/127


def test_var_127_fused_adamw_fails_on_state_steps_after_a_resume(device: torch.device, tmp_path: Path) -> None:
    path, _, _ = saved_run(device, tmp_path, fused=True)
    run = resumed(device, path, fused=True)
    with pytest.raises(RuntimeError, match=MISMATCH):
        run.step()
    run = resumed(device, path, fused=True)
    move_moments_only(run.optimizer)
    with pytest.raises(RuntimeError, match=f"{MISMATCH}.*state_steps"):
        run.step()


@pytest.mark.parametrize(
    ("flags", "remedy"), [({"fused": True}, move_moments_only), ({}, move_everything)], ids=["fused", "plain"]
)
def test_var_127_continues_bit_identically_and_not_with_wrong_remedies(
    flags: dict, remedy: Callable, device: torch.device, tmp_path: Path
) -> None:
    path, weights, losses = saved_run(device, tmp_path, **flags)
    repaired = resumed(device, path, **flags)
    assert not audit(repaired.parts()).ok
    assert repair_optimizer(repaired.optimizer).moved
    assert_continues(repaired, weights, losses)
    ours = built(device, **flags)
    state = load_checkpoint(tmp_path / "ours", **ours.parts())
    assert state.step == 3 and bool(ours.optimizer.param_groups[0]["fused"]) == flags.get("fused", False)
    assert_continues(ours, weights, losses)
    wrong = resumed(device, path, **flags)
    remedy(wrong.optimizer)
    findings = {(finding.level, finding.name.rpartition(".")[2]) for finding in audit(wrong.parts()).findings}
    assert findings == {("error" if flags else "warning", "step")}
    with pytest.raises(AssertionError):
        assert_continues(wrong, weights, losses)


# Scene 2: rasbt/LLMs-from-scratch #172, https://github.com/rasbt/LLMs-from-scratch/issues/172


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_emb = torch.nn.Embedding(16, 4)
        self.register_buffer("mask", torch.ones(5, 1))
        self.out_head = torch.nn.Linear(4, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out_head(self.tok_emb(tokens) * self.mask)


def test_llms_from_scratch_172_a_head_made_after_to(device: torch.device) -> None:
    model, tokens = Classifier().to(device), torch.zeros(2, 5, dtype=torch.long, device=device)
    model.out_head = torch.nn.Linear(4, 2)  # the fine-tuning chapter's new head, made after `.to`
    with pytest.raises(RuntimeError, match=MISMATCH):
        model(tokens)
    assert next(model.parameters()).device == device  # the article's assert passes on the broken model
    errors = audit({"model": model}, device=device).errors
    assert {finding.name for finding in errors} == {"out_head.weight", "out_head.bias"}
    with guard(model), pytest.raises(DeviceMismatchError) as caught:
        model(tokens)
    assert (caught.value.module, caught.value.argument) == ("out_head", "input")
    model.to(device)
    assert audit({"model": model}, device=device).findings == ()
    with guard(model):
        assert model(tokens).device == device


# Scene 3: rasbt/LLMs-from-scratch #232, https://github.com/rasbt/LLMs-from-scratch/issues/232


@pytest.mark.parametrize("flags", [{"foreach": True}, {"fused": True}, {"capturable": True}], ids=str)
def test_llms_from_scratch_232_state_loaded_while_the_model_was_on_the_cpu(
    flags: dict, device: torch.device, tmp_path: Path
) -> None:
    path, weights, losses = saved_run(device, tmp_path, **flags)
    run = resumed(device, path, **flags)
    report = audit({"model": run.model, "optimizer": run.optimizer}, device=device)
    assert "optimizer.model.0.weight.exp_avg" in {finding.path for finding in report.errors}
    # torch.optim itself checks capturable groups, with an assert.
    with pytest.raises((RuntimeError, AssertionError), match=r"device"):
        run.step()
    run = resumed(device, path, **flags)
    repair_optimizer(run.optimizer)
    step = run.optimizer.state[run.model[0].weight]["step"]
    assert step.device == (CPU if "foreach" in flags else device)
    assert_continues(run, weights, losses)


# Scene 5: OpenBMB/MiniCPM-V #246 and deepspeedai/DeepSpeed #5422, https://github.com/deepspeedai/DeepSpeed/issues/5422


def test_minicpm_v_246_an_offloaded_gradient_times_a_scale_on_the_device(device: torch.device) -> None:
    norms = [torch.tensor(3.0, device=device), torch.tensor(4.0, device=device)]
    total_norm = torch.norm(torch.stack(norms))  # DeepSpeed 0.14.1: 0-dim, on the device
    gradient = torch.ones(8)  # of an fp32 partition that ZeRO offloads to the CPU
    with pytest.raises(RuntimeError, match=MISMATCH):
        gradient.mul_(1.0 / total_norm)
    report = audit({"gradient": gradient, "total_norm": total_norm})
    assert [(finding.path, finding.found) for finding in report.errors] == [("total_norm", str(device))]
    # What 0.14.3 does. The rule is not symmetric: a number on the CPU goes with tensors anywhere.
    for where in (CPU, device):
        assert audit({"gradient": gradient.to(where), "total_norm": total_norm.cpu()}, device=where).findings == ()
    gradient.mul_(1.0 / total_norm.cpu())
    assert gradient.tolist() == pytest.approx([0.2] * 8)
