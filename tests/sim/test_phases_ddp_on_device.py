"""Phases and validations under DistributedDataParallel on a second device, in one process and in two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ddp_hooks import counted, process_group  # noqa: F401  # the second is a fixture
from helpers.gloo_ranks import run_ranks
from helpers.runner_runs import precache_training_set, validation_config
from torch.nn.parallel import DistributedDataParallel

from latentcache.config import Config
from latentcache.phases.phases import Phase, Phases

WORKER = Path(__file__).parent / "ddp_worker.py"


@pytest.mark.usefixtures("process_group")
def test_gradients_are_reduced_after_a_phase_that_parks_all(device: torch.device) -> None:
    """Without a first synchronisation, and with one backward: the group has no collectives on a simulated device."""
    net = torch.nn.Linear(3, 3).to(device)
    ddp = DistributedDataParallel(net, init_sync=False)
    reduced = counted(ddp)
    vae = torch.nn.Linear(3, 3).to(device).requires_grad_(False)
    phases = Phases({"unet": net, "vae": vae}, device=device)
    phases.start("train")
    with phases.enter(Phase(on_device=())):
        assert phases.on_device() == {"unet"}
        with phases.lend("vae"):
            assert phases.on_device() == {"unet", "vae"}
    ddp(torch.ones(2, 3, device=device)).square().sum().backward()
    assert reduced == [0]


@pytest.mark.parametrize("given", ["the wrapper", "the module inside"])
def test_two_ranks_train_on_after_a_cold_validation_of_one(
    given: str, make_config: Callable[..., Config], photos: Path, tmp_path: Path, device: torch.device
) -> None:
    """The first rank encodes what is missing, for which a UNet that is not under DDP is parked."""
    config = validation_config(make_config, photos)
    precache_training_set(config)
    folder = tmp_path / "ranks"
    folder.mkdir()
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / "case.txt").write_text(f"{device}\n{given}")
    ranks: list[dict[str, Any]] = run_ranks(WORKER, folder)
    assert [rank["num_filled"] > 0 for rank in ranks] == [True, False]
    assert "unet is not moved: under DistributedDataParallel" in ranks[0]["notes"]
    for rank in ranks:
        losses, _ = rank["without"]
        assert losses[-1] != losses[0]
        assert rank["with"] == rank["without"]
    assert ranks[0]["with"][1] == ranks[1]["with"][1], "the ranks have different weights"
    assert ranks[0]["with"][0] != ranks[1]["with"][0], "the ranks have the same samples: this shows nothing"
