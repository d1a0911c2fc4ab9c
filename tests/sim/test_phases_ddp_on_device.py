"""Phases around DistributedDataParallel in one process: its hooks hang on the weights, and a move would drop them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from latentcache.errors import PhaseError
from latentcache.phases.phases import Phase, Phases

REASON = "under DistributedDataParallel, whose hooks a move would drop"
GIVEN: dict[str, Callable[[Any], torch.nn.Module]] = {
    "the wrapper": lambda ddp: ddp,
    "the module inside": lambda ddp: ddp.module,
    "a part of the module inside": lambda ddp: ddp.module[0],
    "a module around it": lambda ddp: torch.nn.Sequential(ddp),
}


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of this process alone, without threads; skips the test where this torch has none."""
    if not dist.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=1)
    gc.freeze()  # phases look for wrappers among all objects: those that were there before the test are many
    yield
    gc.unfreeze()
    dist.destroy_process_group()


def counted(ddp: Any) -> list[int]:
    """A list that gets an entry for each bucket of gradients that DDP reduces from now on."""
    reduced: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, which are strings here
        reduced.append(bucket.index())
        gradients = torch.futures.Future()
        gradients.set_result(bucket.buffer())
        return gradients

    ddp.register_comm_hook(None, hook)
    return reduced


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_a_part_under_ddp_is_not_moved_and_a_cast_is_an_error(
    given: Callable[[Any], torch.nn.Module], device: torch.device
) -> None:
    """Without a first synchronisation, and with one forward under DDP: a simulated device has no collectives."""
    net, vae = torch.nn.Sequential(torch.nn.Linear(3, 3)).to(device), torch.nn.Linear(3, 3).requires_grad_(False)
    early = Phases({"unet": net}, device=device)
    assert early.not_moved() == {}
    ddp = torch.nn.parallel.DistributedDataParallel(net, init_sync=False)
    assert early.not_moved() == {"unet": REASON}
    phases, reduced = Phases({"unet": given(ddp), "vae": vae}, device=device), counted(ddp)
    phases.start("train")
    with phases.enter(Phase(on_device=())):
        assert phases.not_moved() == {"unet": REASON} and phases.on_device() == {"unet"}
        with phases.lend("vae"):
            assert phases.on_device() == {"unet", "vae"}
    ddp(torch.ones(2, 3, device=device)).square().sum().backward()
    assert reduced == [0]

    before = [(t, t.dtype, t.data_ptr(), t.detach().clone()) for t in ddp.parameters()]
    refused = pytest.raises(PhaseError, match="wrap the module in DistributedDataParallel again")
    with refused as caught, phases.enter("validate"):
        for parameter in phases.module("unet").parameters():
            parameter.data = parameter.data.half()  # as `Module.half` does on CUDA
    assert "weight" in str(caught.value)
    for tensor, dtype, memory, values in before:
        assert (tensor.dtype, tensor.data_ptr()) == (dtype, memory) and torch.equal(tensor, values)
    net(torch.ones(2, 3, device=device)).square().sum().backward()
    assert reduced == [0], "the hooks are there: this is no error"
