"""DistributedDataParallel in one process, and what its hooks do."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist


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
