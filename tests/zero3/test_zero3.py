"""DeepSpeed ZeRO-3 with offload on its CPU accelerator: a real step audits clean. An opt-in lane.

The folder is not called `deepspeed`: with `tests` on the path, that name would look like the package.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from latentcache.doctor.deepspeed import check_deepspeed_config

pytestmark = pytest.mark.deepspeed

WORKER = Path(__file__).parent / "zero3_worker.py"
ROOT = WORKER.parents[2]
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

OFFLOAD = {"device": "cpu", "pin_memory": False}
STEP_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.5,  # the path of DeepSpeed #5422
    "zero_force_ds_cpu_optimizer": False,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,  # else parameters as small as these are never partitioned
        "offload_param": OFFLOAD,
        "offload_optimizer": OFFLOAD,
    },
}

IGNORED = {
    "offload_param at stage 2": {"stage": 2, "offload_param": OFFLOAD},
    "offload_optimizer at stage 0": {"stage": 0, "offload_optimizer": OFFLOAD},
    "parameters offloaded, optimizer not": {"stage": 3, "offload_param": OFFLOAD},
}
REFUSED = {"a device that is none": {"stage": 3, "offload_param": {"device": "gpu"}}}


def run_worker(*arguments: str) -> dict[str, Any]:
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": LOOPBACK}
    command = [sys.executable, str(WORKER), *arguments]
    # The first run compiles DeepSpeed's shared-memory communication: about a minute.
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def test_a_zero3_step_with_offload_audits_clean(tmp_path: Path) -> None:
    assert [f for f in check_deepspeed_config(STEP_CONFIG) if f.level in ("warning", "error")] == []
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps(STEP_CONFIG), encoding="utf-8")
    result = run_worker("step", str(config), free_port())
    assert result["num_partitioned"] == 6
    assert result["losses"][1] < result["losses"][0]
    assert result["report"]["findings"] == []
    # The audit has seen the partitions and the optimizer's state, not only the batch.
    assert result["report"]["num_tensors"] > 6
    assert any("ZeRO-3" in note for note in result["report"]["notes"])


def test_our_check_agrees_with_deepspeed_on_what_it_accepts(tmp_path: Path) -> None:
    configs = {
        name: {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        for name, zero in (IGNORED | REFUSED).items()
    }
    file = tmp_path / "configs.json"
    file.write_text(json.dumps(configs), encoding="utf-8")
    verdicts = run_worker("configs", str(file))
    for name, config in configs.items():
        findings = check_deepspeed_config(config)
        assert findings, name
        refused_by_us = any(finding.level == "error" for finding in findings)
        assert refused_by_us == (name in REFUSED), name
        assert (verdicts[name] != "accepted") == (name in REFUSED), verdicts[name]
