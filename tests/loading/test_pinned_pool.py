"""Buffers that are used again: a tensor stays valid as long as anything refers to its memory."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.loading.batch import BufferPool
from latentcache.store.batch import new_tensor
from latentcache.store.entry import ALIGNMENT

SHAPES = {"moments": (torch.bfloat16, (2, 3, 5)), "pooled": (torch.float32, (2, 7)), "flag": (torch.bool, (2,))}


def tensors_of(pool: BufferPool, shapes: dict[str, Any] = SHAPES) -> dict[str, torch.Tensor]:
    """A tensor for each, all in one buffer."""
    empty = pool.borrow([math.prod(shape) * dtype.itemsize for dtype, shape in shapes.values()])
    names = {name: str(dtype).removeprefix("torch.") for name, (dtype, _) in shapes.items()}
    return {name: new_tensor(names[name], shape, empty)[0] for name, (_, shape) in shapes.items()}


def test_tensors_have_their_shapes_and_start_aligned() -> None:
    tensors = tensors_of(BufferPool())
    for name, (dtype, shape) in SHAPES.items():
        tensor = tensors[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape) and tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGNMENT == 0
        tensor.fill_(1)
    assert all(bool((tensor == 1).all()) for tensor in tensors.values()), "they do not overlap"


@pytest.mark.parametrize("keep", ["tensor", "view", "autograd", "other"])
def test_a_buffer_comes_back_when_nothing_shares_its_memory(keep: str) -> None:
    pool = BufferPool()
    tensors = tensors_of(pool)
    address = tensors["moments"].data_ptr()
    if keep == "tensor":
        held: Any = tensors["moments"]
    elif keep == "view":
        held = tensors["moments"][1, 2:].float().new_tensor(0), tensors["moments"].flatten()[3:4]
    elif keep == "autograd":
        held = (tensors["pooled"] * torch.ones(7, requires_grad=True)).sum()
    else:
        held = tensors["flag"]  # of another field of the same batch
    del tensors
    gc.collect()
    second = tensors_of(pool)
    assert second["moments"].data_ptr() != address and pool.num_allocated == 2
    del held
    gc.collect()
    assert tensors_of(pool)["moments"].data_ptr() == address and pool.num_allocated == 2


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 6)), max_size=40))
def test_what_is_held_keeps_its_values(steps: list[tuple[int, int]]) -> None:
    pool = BufferPool(num_kept=2)
    held: list[tuple[int, torch.Tensor]] = []
    for number, (size, drop) in enumerate(steps):
        tensor = tensors_of(pool, {"a": (torch.int64, (size,))})["a"].fill_(number)
        held.append((number, tensor))
        del tensor
        if drop < len(held):
            del held[drop]
        assert all(bool((tensor == value).all()) for value, tensor in held)
