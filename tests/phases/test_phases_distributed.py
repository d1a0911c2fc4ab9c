"""The phase switch in two processes on gloo: DistributedDataParallel and fully_shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.gloo_ranks import run_ranks

WORKER = Path(__file__).parent / "phase_worker.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank printed."""
    return run_ranks(WORKER, tmp_path_factory.mktemp("phases"))


@pytest.mark.parametrize("where", ["on rank 0", "on both", "before the update"])
@pytest.mark.parametrize("unused", [False, True])
def test_ddp_trains_on_bit_by_bit(unused: bool, where: str, ranks: list[dict[str, Any]]) -> None:
    """The eager module has no collectives: one rank may validate while the other goes on."""
    for rank in ranks:
        outcomes = rank["ddp"][f"find_unused_parameters={unused}"]
        losses, *_ = outcomes["without"]
        assert losses[-1] < losses[0]
        assert outcomes[where] == outcomes["without"]


@pytest.mark.parametrize("scenario", ["after the update", "before the update", "with an ema"])
def test_shards_train_on_bit_by_bit(scenario: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        outcomes = rank["fsdp"]["outcomes"]
        assert outcomes[scenario] == outcomes["without"]
        assert all(difference > 0.1 for difference in rank["fsdp"]["averages"]), "the average was not in"
    assert ranks[0]["fsdp"]["outcomes"]["without"][1] != ranks[1]["fsdp"]["outcomes"]["without"][1], (
        "nothing is sharded"
    )


def test_shards_are_not_moved_and_not_left_gathered(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["fsdp"]
        assert found["reason"] == found["still not moved"] == "FSDPNet is sharded by FSDP"
        assert found["gathered"] == 4, "FSDP left nothing gathered: this test shows nothing"
        assert found["left gathered"] == 0
        assert found["flags restored"] and not found["training"]
        assert found["compiled after it"] and not found["compiled in the phase"]
