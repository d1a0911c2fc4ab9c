"""The phase switch in two gloo processes, with DistributedDataParallel and with fully_shard."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.gloo_ranks import run_ranks
from helpers.photo_files import write_photos
from helpers.runner_runs import precache_training_set, validation_config
from helpers.tiny_configs import tiny_config


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank printed."""
    folder = tmp_path_factory.mktemp("phases")
    config = validation_config(partial(tiny_config, folder), write_photos(folder / "photos"))
    precache_training_set(config)
    (folder / "config.json").write_text(config.model_dump_json())
    return run_ranks(Path(__file__).parent / "phase_worker.py", folder)


@pytest.mark.parametrize("given", ["Wrapper", "Inside"])
def test_ddp_trains_on_bit_by_bit_after_a_validation_on_one_rank(given: str, ranks: list[dict[str, Any]]) -> None:
    """The eager module has no collectives, so one rank can validate and fill the cache while the other continues."""
    first, second = ranks
    assert first[given] == first["without"] and second[given] == second["without"]
    assert first[given][0] != second[given][0], "the ranks have the same samples: this shows nothing"
    cold, warm = first["num_filled"]
    assert cold > 0 and warm == 0 and second["num_filled"] == [None, None]
    assert "unet is not moved: under DistributedDataParallel" in " ".join(first["notes"])


def test_shards_train_on_bit_by_bit_and_are_neither_moved_nor_left_gathered(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["fsdp"] for rank in ranks)
    assert first["without"][1] != second["without"][1], "nothing is sharded"
    for found in (first, second):
        assert found["with"] == found["without"]
        assert found["reasons"] == ["FSDPUNet2DConditionModel is sharded by FSDP"] * 2
        assert found["gathered before"], "FSDP left nothing gathered: this test shows nothing"
        assert found["gathered after"] == 0
        assert found["eager"] and not found["training"] and found["restored"] and found["averages are in"]
