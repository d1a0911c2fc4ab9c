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


def test_a_zero3_step_with_offload_audits_clean() -> None:
    assert [f for f in check_deepspeed_config(STEP_CONFIG) if f.level in ("warning", "error")] == []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": LOOPBACK}
    command = [sys.executable, str(WORKER), json.dumps(STEP_CONFIG), port]
    # The first run compiles DeepSpeed's shared-memory communication: about a minute.
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["num_partitioned"] == 6
    assert result["losses"][1] < result["losses"][0]
    assert result["report"]["findings"] == []
    # The audit has seen the partitions and the optimizer's state, not only the batch.
    assert result["report"]["num_tensors"] > 6
    assert any("ZeRO-3" in note for note in result["report"]["notes"])
