"""One rank of test_fsdp: train a tiny module under FSDP2 on gloo, audit it, and print what was found as JSON.

`python fsdp_worker.py RANK WORLD_SIZE RENDEZVOUS_FILE`, with `tests` on the PYTHONPATH.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from helpers.gloo_ranks import report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from latentcache.devices.audit import AuditReport, audit


def trained(world_size: int, policy: OffloadPolicy, *, optimizer_first: bool = False) -> tuple[AuditReport, float]:
    """Two steps under FSDP2; gives the audit and the loss. `optimizer_first`: built before the module is sharded."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world_size,))
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for part in (module[0], module[2], module):
        fully_shard(part, mesh=mesh, offload_policy=policy)
    if not optimizer_first:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    sharded = sum(isinstance(parameter, DTensor) for parameter in module.parameters())
    assert sharded == 6, f"{sharded} of 6 parameters are sharded"
    inputs = torch.randn(8, 6)
    for _ in range(2):
        loss = module(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    parts = {"module": module, "optimizer": optimizer, "batch": {"inputs": inputs}}
    return audit(parts, device="cpu", training={"module": True}), loss.item()


def main() -> None:
    rank, world_size, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    runs: dict[str, dict[str, Any]] = {
        "plain": {"policy": OffloadPolicy()},
        "offloaded": {"policy": CPUOffloadPolicy(pin_memory=False)},
        "orphaned": {"policy": OffloadPolicy(), "optimizer_first": True},
    }
    try:
        found = {name: trained(world_size, **settings) for name, settings in runs.items()}
    finally:
        dist.destroy_process_group()
    report({name: asdict(audited) | {"loss": loss} for name, (audited, loss) in found.items()})


if __name__ == "__main__":
    main()
