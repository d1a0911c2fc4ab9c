from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from latentcache.encoders.batching import BatchRunner, is_out_of_memory
from latentcache.errors import EncodeError


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> Iterator[None]:
    """Each shortage collects garbage: without this, each collection walks all of torch and diffusers."""
    gc.freeze()
    yield
    gc.unfreeze()


class LimitedMemory:
    """An encoder that fits `limits[item]` items in one call at most."""

    def __init__(self, limits):
        self.limits, self.calls = limits, []

    def __call__(self, items):
        self.calls.append(len(items))
        if any(self.limits[item] < len(items) for item in items):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return [item * 10 for item in items]


@given(limits=st.lists(st.integers(1, 9), max_size=25), batch_size=st.integers(1, 12))
def test_every_item_completes_once_and_in_order(limits, batch_size):
    runner = BatchRunner("vae", batch_size, "cpu")
    batches = runner.run(range(len(limits)), LimitedMemory(limits))
    done = [pair for items, results in batches for pair in zip(items, results, strict=True)]
    assert done == [(index, index * 10) for index in range(len(limits))]
    assert 1 <= runner.batch_size <= batch_size


@pytest.mark.parametrize("failing_call", [1, 2, 3, 4])
def test_a_shortage_at_any_call_halves_the_batch_and_all_items_complete(failing_call):
    calls = []

    def encode(items):
        calls.append(len(items))
        if len(calls) == failing_call:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
            )
        return torch.tensor(items)

    runner = BatchRunner("vae", 4, "cpu")
    done = torch.cat([result for _, result in runner.run(list(range(16)), encode)])
    assert done.tolist() == list(range(16))
    assert (runner.batch_size, runner.num_reductions) == (2, 1)
    assert calls[failing_call - 1 : failing_call + 1] == [4, 2]


def test_an_item_that_does_not_fit_alone_is_refused_by_name_and_the_rest_goes_on():
    refused = []
    runner = BatchRunner("vae", 4, "cpu")
    batches = runner.run(range(6), LimitedMemory([4, 4, 0, 4, 4, 4]), lambda item, error: refused.append((item, error)))
    assert [item for items, _ in batches for item in items] == [0, 1, 3, 4, 5]
    [(item, error)] = refused
    assert item == 2
    assert (error.problem, error.part) == ("out-of-memory", "vae")


def test_without_a_handler_the_refusal_is_raised():
    with pytest.raises(EncodeError, match="one item alone does not fit") as caught:
        list(BatchRunner("vae", 2, "cpu").run([0], LimitedMemory([0])))
    assert caught.value.problem == "out-of-memory"


def test_other_errors_pass_through():
    def encode(items):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        list(BatchRunner("vae", 2, "cpu").run([0, 1], encode))


def test_what_the_failed_call_held_is_freed_before_the_next_one():
    held, alive = [], []

    def encode(items):
        alive.append([reference() is not None for reference in held])
        big = torch.zeros(8)
        held.append(weakref.ref(big))
        if len(items) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return items

    list(BatchRunner("vae", 2, "cpu").run([0, 1], encode))
    assert alive == [[], [False], [False, False]]


def test_a_real_shortage_of_the_cpu_allocator_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 46)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(ValueError("out of memory"))


def test_a_batch_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        BatchRunner("vae", 0, "cpu")
