"""`latentcache doctor`: on a machine without a GPU, as a table and as JSON, with honest exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import latentcache.doctor.environment
import latentcache.doctor.training_check
from latentcache.doctor.training_check import try_training


@pytest.fixture
def run(run: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    """`run` of this file's command; run_json follows it."""
    return partial(run, "doctor")


def subjects(report: dict[str, Any], level: str) -> list[str]:
    return [finding["subject"] for finding in report["findings"] if finding["level"] == level]


def test_a_deepspeed_config(run: Any, run_json: Any, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    assert run_json("--deepspeed", path)[0] == 2  # it is not there
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}))
    code, report = run_json("--device", "cpu", "--deepspeed", path)
    assert code == 0 and subjects(report, "warning") == ["zero_optimization.offload_param"]
    path.write_text(json.dumps({"zero_optimization": {"stage": 4}}))
    code, report = run_json("--device", "cpu", "--deepspeed", path)
    assert code == 1 and subjects(report, "error") == ["zero_optimization.stage"]
    code, out, _ = run("--device", "cpu", "--deepspeed", path)
    assert code == 1 and "error    zero_optimization.stage" in out and out.splitlines()[-1].startswith("1 error")


def test_a_training_step_is_audited(run_json: Any) -> None:
    random_state = torch.random.get_rng_state()
    code, report = run_json("--device", "cpu", "--training")
    assert code == 0 and "training check" in subjects(report, "ok")
    training = report["training"]
    assert training["device"] == "cpu" and 0 < training["loss"] < 10
    assert training["audit"]["findings"] == []
    # 3 tensors of each parameter's optimizer state, its gradient and itself, and the batch.
    assert training["audit"]["num_tensors"] > 1000
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert run_json("--device", "cpu", "--training")[1]["training"]["loss"] == training["loss"]


def test_a_tensor_left_behind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit's findings come through: here the model forgets that it trains."""
    tiny_denoiser = latentcache.doctor.training_check.tiny_denoiser

    def half_eval() -> torch.nn.Module:
        unet = tiny_denoiser()
        unet.mid_block.train = lambda mode=True: unet.mid_block  # refuses the switch
        unet.mid_block.training = False
        return unet

    monkeypatch.setattr(latentcache.doctor.training_check, "tiny_denoiser", half_eval)
    found = try_training(torch.device("cpu"))
    assert not found.ok and any("mid_block" in finding.found for finding in found.findings)
