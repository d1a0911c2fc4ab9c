"""FSDP2 in two processes on gloo: shards are audited on their devices, and a sharded run is clean.

Each rank runs this file: `python test_fsdp.py RANK WORLD_SIZE RENDEZVOUS_FILE`, with `tests` on the PYTHONPATH.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gloo_ranks import report, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from latentcache.devices.audit import AuditReport, audit


def trained(world_size: int, policy: OffloadPolicy, *, optimizer_first: bool = False) -> tuple[AuditReport, float]:
    """Two steps under FSDP2; returns the audit and the loss. `optimizer_first`: built before the module is sharded."""
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


def test_a_sharded_run_is_clean_and_an_optimizer_built_before_sharding_trains_orphans(tmp_path: Path) -> None:
    ranks = run_ranks(Path(__file__), tmp_path)
    for rank in ranks:
        for policy in ("plain", "offloaded"):
            assert rank[policy]["findings"] == []
            # 6 parameters with gradients, 3 buffers, 6 x 3 state tensors, the batch.
            assert rank[policy]["num_tensors"] == 6 + 6 + 3 + 18 + 1
            assert rank[policy]["loss"] == pytest.approx(ranks[0][policy]["loss"])
        # `fully_shard` makes new parameters. Nothing fails, but the second step has the loss of the first.
        findings = rank["orphaned"]["findings"]
        assert [f["part"] for f in findings if f["kind"] == "orphan" and f["level"] == "error"] == ["optimizer"] * 6
        assert rank["orphaned"]["loss"] > rank["plain"]["loss"]


if __name__ == "__main__":
    main()
