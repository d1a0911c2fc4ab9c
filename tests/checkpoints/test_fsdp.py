"""FSDP2 in two processes on gloo: shards are audited where they lie, and a sharded run is clean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.gloo_ranks import run_ranks

WORKER = Path(__file__).parent / "fsdp_worker.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank printed."""
    return run_ranks(WORKER, tmp_path_factory.mktemp("fsdp"))


def test_a_sharded_run_is_clean(ranks: list[dict[str, Any]]) -> None:
    for policy in ("plain", "offloaded"):
        for rank in ranks:
            assert rank[policy]["findings"] == []
            # 6 parameters with gradients, 3 buffers, 6 x 3 state tensors, the batch.
            assert rank[policy]["num_tensors"] == 6 + 6 + 3 + 18 + 1
        assert ranks[0][policy]["loss"] == pytest.approx(ranks[1][policy]["loss"])


def test_an_optimizer_built_before_sharding_trains_orphans(ranks: list[dict[str, Any]]) -> None:
    """`fully_shard` makes new parameters. Nothing fails, and the loss of the second step is that of the first."""
    for rank in ranks:
        findings = rank["orphaned"]["findings"]
        assert [f["part"] for f in findings if f["kind"] == "orphan" and f["level"] == "error"] == ["optimizer"] * 6
        assert rank["orphaned"]["loss"] > rank["plain"]["loss"]
