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


class Run:
    """A small net under DDP, of which `given` makes the part."""

    def __init__(self, given: Callable[[Any], torch.nn.Module]):
        self.ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)))
        self.reduced = counted(self.ddp)
        self.phases = Phases({"unet": given(self.ddp)}, device="cpu")
        self.phases.start("train")
        self.step()

    def step(self) -> int:
        """The number of buckets that were reduced."""
        self.reduced.clear()
        self.ddp(torch.ones(2, 3)).square().sum().backward()
        return len(self.reduced)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_a_part_under_ddp_is_not_moved(given: Callable[[Any], torch.nn.Module]) -> None:
    run = Run(given)
    assert run.phases.not_moved() == {"unet": REASON}
    with run.phases.enter("validate"), run.phases.enter("sample"):
        assert run.phases.not_moved() == {"unet": REASON}
    assert run.step() == 1


@pytest.mark.usefixtures("process_group")
def test_a_part_that_ddp_wraps_later_is_not_moved() -> None:
    net = torch.nn.Linear(3, 3)
    phases = Phases({"unet": net, "vae": torch.nn.Linear(3, 3)}, device="cpu")
    assert phases.not_moved() == {}
    ddp = DistributedDataParallel(net)
    assert phases.not_moved() == {"unet": REASON}
    assert ddp.module is net


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("cast_back", [True, False])
def test_a_cast_under_ddp_is_an_error_that_says_what_to_do(
    cast_back: bool, given: Callable[[Any], torch.nn.Module]
) -> None:
    run = Run(given)
    tensors = [*run.ddp.parameters(), *run.ddp.buffers()]
    before = [(t, t.dtype, t.data_ptr(), t.detach().clone()) for t in tensors]
    refused = pytest.raises(PhaseError, match="wrap the module in DistributedDataParallel again")
    with refused as caught, run.phases.enter("validate") as phases:
        phases.module("unet").half()
        if cast_back:
            phases.module("unet").float()
    assert "0.weight" in str(caught.value) or "unet.weight" in str(caught.value)
    for tensor, dtype, memory, values in before:
        assert (tensor.dtype, tensor.data_ptr()) == (dtype, memory) and torch.equal(tensor, values)
    assert run.step() == 0, "the hooks are there: this is no error"
