"""Run in a process of its own by test_zero3: DeepSpeed on its CPU accelerator. Prints what was found as JSON.

`python zero3_worker.py CONFIG PORT`, the config as JSON, trains two steps and audits.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

import torch

from latentcache.devices.audit import audit


def trained(config: dict[str, Any], port: str) -> dict[str, Any]:
    """Two steps under the config: the losses, the audit, and how many parameters ZeRO-3 has partitioned."""
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
    # DeepSpeed prints to stdout as well: the last line is the result.
    print("\n" + json.dumps(trained(json.loads(sys.argv[1]), sys.argv[2])), flush=True)
