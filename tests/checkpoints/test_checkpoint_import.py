"""Checkpoints of other programs: read without running what they contain, or refused with the reason."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_run import Trap

from latentcache import import_checkpoint, load_optimizer_state
from latentcache.errors import CheckpointError


def run_parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def test_the_file_of_var_resumes_a_fused_optimizer(tmp_path: Path) -> None:
    """The layout of VAR #127: the optimizer two levels down, and flags that differ from those of the second run."""
    model, optimizer = run_parts()
    trainer = {"var_wo_ddp": model.state_dict(), "var_opt": {"optimizer": optimizer.state_dict()}}
    found = import_checkpoint(saved(tmp_path / "ar-ckpt-last.pth", {"epoch": 3, "trainer": trainer}))
    assert (found.epoch, found.step, found.ema, found.model) == (3, None, None, None)
    fused = torch.optim.AdamW((other := torch.nn.Linear(2, 2)).parameters(), fused=True)
    load_optimizer_state(fused, found.content["trainer"]["var_opt"]["optimizer"])
    assert (fused.param_groups[0]["fused"], fused.param_groups[0]["lr"]) == (True, 0.5)
    assert torch.equal(fused.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_lightning_names_are_known_and_a_flat_file_is_a_model(tmp_path: Path) -> None:
    model, optimizer = run_parts()
    content = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 40}
    found = import_checkpoint(saved(tmp_path / "last.ckpt", content))
    assert (found.epoch, found.step) == (None, 40)
    assert found.optimizer is not None and found.optimizer["param_groups"][0]["lr"] == 0.5
    assert found.model is not None and torch.equal(found.model["weight"], model.weight)
    flat = import_checkpoint(saved(tmp_path / "model.bin", model.state_dict()))
    assert torch.equal(flat.model["weight"], model.weight) and flat.optimizer is None


@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "before torch 1.6"])
def test_a_file_that_needs_code_is_refused_and_does_not_run_it(new_format: bool, tmp_path: Path) -> None:
    torch.save({"x": Trap(tmp_path / "was-run")}, tmp_path / "bad.ckpt", _use_new_zipfile_serialization=new_format)
    with pytest.raises(CheckpointError, match="needs code to be run") as caught:
        import_checkpoint(tmp_path / "bad.ckpt")
    assert not (tmp_path / "was-run").exists()
    if new_format:
        assert any("pathlib" in name for name in caught.value.offenders)


def test_names_that_someone_trusts_can_be_allowed(tmp_path: Path) -> None:
    path = saved(tmp_path / "args.pt", {"args": argparse.Namespace(lr=1), "step": 5})
    with pytest.raises(CheckpointError, match=r"(?s)safe_globals.*argparse\.Namespace"):
        import_checkpoint(path)
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert import_checkpoint(path).step == 5


def test_damaged_foreign_and_missing_files_are_distinguished(tmp_path: Path) -> None:
    model, _ = run_parts()
    whole = saved(tmp_path / "whole.pt", model.state_dict()).read_bytes()
    for name, data in (("cut.pt", whole[: len(whole) // 2]), ("empty.pt", b"")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CheckpointError, match="is damaged, or not written by torch") as caught:
            import_checkpoint(tmp_path / name)
        assert "weights_only" not in str(caught.value), "no advice to read it without restrictions"
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_checkpoint(tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="read it with safetensors"):
        import_checkpoint(tmp_path / "model.safetensors")
