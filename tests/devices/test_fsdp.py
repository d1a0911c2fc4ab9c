"""FSDP2 in two processes on gloo: shards are audited where they lie, and a sharded run is clean."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

WORKER = Path(__file__).parent / "fsdp_worker.py"
ROOT = WORKER.parents[2]
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
WORLD_SIZE = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank printed. They meet over a file: a port that was free a moment ago may not be."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this build of torch has no gloo")
    command = [sys.executable, "-W", "error", str(WORKER)]
    rendezvous = tmp_path_factory.mktemp("fsdp") / "rendezvous"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
    }
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD_SIZE), str(rendezvous)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.mark.parametrize("policy", ["plain", "offloaded"])
def test_a_sharded_run_is_clean(policy: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank[policy]["findings"] == []
        # 6 parameters with gradients, 3 buffers, 6 x 3 state tensors, the batch.
        assert rank[policy]["num_tensors"] == 6 + 6 + 3 + 18 + 1
    assert ranks[0]["losses"][policy] == pytest.approx(ranks[1]["losses"][policy])


def test_an_optimizer_made_before_sharding_trains_orphans(ranks: list[dict[str, Any]]) -> None:
    """`fully_shard` makes new parameters. Nothing fails, and the loss of the second step is that of the first."""
    for rank in ranks:
        findings = rank["orphaned"]["findings"]
        assert not rank["orphaned"]["ok"]
        assert [f["part"] for f in findings if f["kind"] == "orphan" and f["level"] == "error"] == ["optimizer"] * 6
        assert rank["losses"]["orphaned"] > rank["losses"]["plain"]
