"""Tensors of arbitrary bits, including NaN, their comparison, and those of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from latentcache.store.base import Store
from latentcache.store.batch import stack


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return values[..., 0] > 127 if dtype == torch.bool else values.view(dtype)[..., 0].clone()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: uint8 [n]."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


def assert_same_state(module: torch.nn.Module, expected: Mapping[str, torch.Tensor]) -> None:
    """Assert that a module has these weights by these names, bit by bit."""
    state = module.state_dict()
    assert state.keys() == expected.keys()
    assert all(same_bits(state[name], expected[name]) for name in expected)  # torch compares no float8


def read_batch(store: Store, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """Entries as one tensor [n, *shape] per field. No keys give no tensors."""
    return stack(keys, store.rows(keys)) if keys else {}
