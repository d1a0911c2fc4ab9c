"""A phase around DistributedDataParallel on a second device, in one process."""

from __future__ import annotations

import pytest
import torch
from helpers.ddp_hooks import counted, process_group  # noqa: F401  # the second is a fixture
from torch.nn.parallel import DistributedDataParallel

from latentcache.phases.phases import Phase, Phases


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
