"""`latentcache doctor`: on a machine without a GPU, as a table and as JSON, with honest exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CPU = ("doctor", "--device", "cpu")


def subjects(report: dict[str, Any], level: str) -> list[str]:
    return [finding["subject"] for finding in report["findings"] if finding["level"] == level]


def test_a_deepspeed_config(run: Any, run_json: Any, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    assert run_json(*CPU, "--deepspeed", path)[0] == 2  # it is not there
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}))
    code, report = run_json(*CPU, "--deepspeed", path)
    assert code == 0 and subjects(report, "warning") == ["zero_optimization.offload_param"]
    path.write_text(json.dumps({"zero_optimization": {"stage": 4}}))
    code, out, _ = run(*CPU, "--deepspeed", path)
    assert code == 1 and "error    zero_optimization.stage" in out


def test_a_training_step_is_audited(run_json: Any) -> None:
    random_state = torch.random.get_rng_state()
    code, report = run_json(*CPU, "--training")
    assert code == 0 and "training check" in subjects(report, "ok")
    training = report["training"]
    assert training["device"] == "cpu" and 0 < training["loss"] < 10
    assert training["audit"]["findings"] == []
    # 3 tensors of each parameter's optimizer state, its gradient and itself, and the batch.
    assert training["audit"]["num_tensors"] > 1000
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert run_json(*CPU, "--training")[1]["training"]["loss"] == training["loss"]
