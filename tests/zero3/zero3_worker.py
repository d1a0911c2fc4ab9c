"""Run in a process of its own by test_zero3: DeepSpeed on its CPU accelerator. Prints what was found as JSON.

`python zero3_worker.py step CONFIG.json PORT` trains two steps and audits; `python zero3_worker.py configs FILE.json`
says which configs of the file DeepSpeed accepts.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
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


def accepted(configs: dict[str, dict[str, Any]]) -> dict[str, str]:
    """For each config `accepted`, or what DeepSpeed's own model says against it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    verdicts = {}
    for name, config in configs.items():
        try:
            DeepSpeedConfig(config)
        except (AssertionError, ValueError, TypeError) as error:
            verdicts[name] = f"{type(error).__name__}: {error}"
        else:
            verdicts[name] = "accepted"
    return verdicts


def main() -> None:
    given = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    result = trained(given, sys.argv[3]) if sys.argv[1] == "step" else accepted(given)
    # DeepSpeed prints to stdout as well: the last line is the result.
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
