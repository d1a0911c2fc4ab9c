"""Phases around DistributedDataParallel in one process: its hooks hang on the weights, and a move would drop them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.ddp_hooks import counted, process_group  # noqa: F401  # the second is a fixture
from torch.nn.parallel import DistributedDataParallel

from latentcache.errors import PhaseError
from latentcache.phases.phases import Phases

REASON = "under DistributedDataParallel, whose hooks a move would drop"
GIVEN: dict[str, Callable[[Any], torch.nn.Module]] = {
    "the wrapper": lambda ddp: ddp,
    "the module inside": lambda ddp: ddp.module,
    "a part of the module inside": lambda ddp: ddp.module[0],
    "a module around it": lambda ddp: torch.nn.Sequential(ddp),
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_a_part_under_ddp_is_not_moved_and_a_cast_is_an_error(given: Callable[[Any], torch.nn.Module]) -> None:
    ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)))
    phases, reduced = Phases({"unet": given(ddp)}, device="cpu"), counted(ddp)
    phases.start("train")
    assert phases.not_moved() == {"unet": REASON}
    with phases.enter("validate"), phases.enter("sample"):
        assert phases.not_moved() == {"unet": REASON}
    ddp(torch.ones(2, 3)).square().sum().backward()
    assert reduced == [0]

    before = [(t, t.dtype, t.data_ptr(), t.detach().clone()) for t in (*ddp.parameters(), *ddp.buffers())]
    refused = pytest.raises(PhaseError, match="wrap the module in DistributedDataParallel again")
    with refused as caught, phases.enter("validate"):
        phases.module("unet").half()
    assert "0.weight" in str(caught.value) or "unet.weight" in str(caught.value)
    for tensor, dtype, memory, values in before:
        assert (tensor.dtype, tensor.data_ptr()) == (dtype, memory) and torch.equal(tensor, values)
    ddp(torch.ones(2, 3)).square().sum().backward()
    assert reduced == [0], "the hooks are there: this is no error"


@pytest.mark.usefixtures("process_group")
def test_a_part_that_ddp_wraps_later_is_not_moved() -> None:
    net = torch.nn.Linear(3, 3)
    phases = Phases({"unet": net, "vae": torch.nn.Linear(3, 3)}, device="cpu")
    assert phases.not_moved() == {}
    ddp = DistributedDataParallel(net)
    assert phases.not_moved() == {"unet": REASON}
    assert ddp.module is net
