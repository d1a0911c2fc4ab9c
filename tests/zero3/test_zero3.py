"""DeepSpeed ZeRO-3 with offload on its CPU accelerator: a real step audits clean. An opt-in lane.

Run as a script with a config and a port, this file trains two steps and prints the result as JSON. The folder is not
called `deepspeed`, because with `tests` on the path that name would hide the package.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from latentcache.devices.audit import audit
from latentcache.doctor.deepspeed import check_deepspeed_config

pytestmark = pytest.mark.deepspeed

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
OFFLOAD = {"device": "cpu", "pin_memory": False}
STEP_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.5,  # the path of DeepSpeed #5422
    "zero_force_ds_cpu_optimizer": False,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,  # or parameters as small as these are never partitioned
        "offload_param": OFFLOAD,
        "offload_optimizer": OFFLOAD,
    },
}


def test_a_zero3_step_with_offload_audits_clean() -> None:
    assert [f for f in check_deepspeed_config(STEP_CONFIG) if f.level in ("warning", "error")] == []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": LOOPBACK}
    command = [sys.executable, __file__, json.dumps(STEP_CONFIG), port]
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


def trained(config: dict[str, Any], port: str) -> dict[str, Any]:
    """Train two steps: the losses, the audit, and how many parameters ZeRO-3 has partitioned."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    import deepspeed

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    engine, optimizer, _, _ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    inputs = torch.randn(4, 6)
    losses = []
    for _ in range(2):
        loss = engine(inputs).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    report = audit({"module": engine.module, "optimizer": optimizer, "inputs": inputs}, device="cpu")
    num_partitioned = sum(hasattr(parameter, "ds_id") for parameter in engine.module.parameters())
    return {"losses": losses, "num_partitioned": num_partitioned, "report": asdict(report)}


if __name__ == "__main__":
    # On a line of its own, because DeepSpeed prints to stdout too.
    print("\n" + json.dumps(trained(json.loads(sys.argv[1]), sys.argv[2])), flush=True)
