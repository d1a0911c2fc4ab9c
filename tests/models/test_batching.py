"""Batches that are halved where memory runs out. Refused items and other errors: see tests/precache/test_run.py."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from latentcache.models.running import BatchRunner, is_out_of_memory


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> Iterator[None]:
    """Each shortage collects garbage: without this, each collection walks all of torch and diffusers."""
    gc.freeze()
    yield
    gc.unfreeze()


def raised(item, error):
    raise error


def test_what_the_failed_call_held_is_freed_before_the_next_one():
    references, alive = [], []

    def encode(items):
        alive.append([reference() is not None for reference in references])
        big = torch.zeros(8)
        references.append(weakref.ref(big))
        if len(items) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return items

    list(BatchRunner("vae", 2, "cpu").run_ahead([[0, 1]], encode, lambda result: result, raised, num_ahead=0))
    assert alive == [[], [False], [False, False]]


def test_a_real_shortage_of_the_cpu_allocator_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 46)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(ValueError("out of memory"))


class Device:
    """Launches at once and gives results when asked; `shortage(phase, items)` says when it runs out, and where."""

    def __init__(self, shortage=lambda phase, items: False):
        self.shortage, self.log, self.most_under_way, self.under_way = shortage, [], 0, 0

    def launch(self, items):
        self.log.append(("launch", *items))
        if self.shortage("launch", items):
            raise torch.OutOfMemoryError("out of memory")
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        return items

    def fetch(self, items):
        self.log.append(("fetch", *items))
        self.under_way -= 1
        if self.shortage("fetch", items):
            raise RuntimeError("CUDA error: out of memory")
        return [item * 10 for item in items]

    def run(self, groups, batch_size, num_ahead=1):
        runner = BatchRunner("vae", batch_size, "cpu")
        return runner.run_ahead(groups, self.launch, self.fetch, raised, num_ahead=num_ahead)


def test_the_next_batch_is_launched_before_the_last_one_is_fetched():
    results = list((device := Device()).run([[0, 1, 2], [3, 4]], 2))
    assert results == [([0, 1], [0, 10]), ([2], [20]), ([3, 4], [30, 40])], "no batch holds items of two groups"
    order = [("launch", 0, 1), ("launch", 2), ("fetch", 0, 1), ("launch", 3, 4), ("fetch", 2), ("fetch", 3, 4)]
    assert device.log == order


@given(
    groups=st.lists(st.lists(st.integers(1, 5), max_size=7), max_size=6),
    batch_size=st.integers(1, 6),
    num_ahead=st.integers(0, 3),
    phase=st.sampled_from(["launch", "fetch"]),
)
def test_every_item_completes_in_order_wherever_memory_runs_out(groups, batch_size, num_ahead, phase):
    """Item n fits into batches of at most `limits[n]`."""
    limits = [limit for group in groups for limit in group]
    numbers = iter(range(len(limits)))
    items = [[next(numbers) for _ in group] for group in groups]
    group_of = {item: number for number, group in enumerate(items) for item in group}
    device = Device(lambda at, batch: at == phase and any(limits[item] < len(batch) for item in batch))
    done = list(device.run(items, batch_size, num_ahead=num_ahead))
    assert [item for batch, _ in done for item in batch] == list(range(len(limits)))
    assert all(result == [item * 10 for item in batch] for batch, result in done)
    assert all(len({group_of[item] for item in batch}) == 1 for batch, _ in done)
    assert device.most_under_way <= num_ahead + 1 or phase == "fetch"
