"""Masks weight the errors of a prediction, whatever layout a family's latents have."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from latentcache import masked_errors
from latentcache.errors import StoreError
from latentcache.families.scaling import patchified


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 4),
    frames=st.sampled_from([None, 1, 3]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_each_error_has_the_weight_of_its_latent(
    sizes: tuple[int, int, int, int], frames: int | None, dtype: torch.dtype, seed: int
) -> None:
    batch, channels, rows, columns = sizes
    errors = drawn(seed, batch, channels, *([frames] if frames else []), 2 * rows, 2 * columns).to(dtype)
    mask = (drawn(seed + 1, batch, 1, 2 * rows, 2 * columns) * 256).to(torch.uint8)
    found = masked_errors(errors, {"mask": mask})
    assert found.dtype == dtype and found.shape == errors.shape
    for number in range(batch):
        weights = mask[number, 0].to(dtype) / 255
        assert torch.equal(found[number], errors[number] * weights)
    assert torch.equal(masked_errors(errors, {"mask": torch.full_like(mask, 255)}), errors)
    assert masked_errors(errors, {}) is errors
    if frames is None:  # patches as channels: the same numbers, elsewhere
        assert torch.equal(masked_errors(patchified(errors), {"mask": mask}), patchified(found))


@pytest.mark.parametrize("shape", [(2, 16, 64), (2, 4, 4, 8), (1, 4, 8, 8), (2, 4, 8, 16), (2, 4, 3, 4, 4)])
def test_errors_of_another_layout_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(StoreError, match=r"the mask is \[2, 1, 8, 8\]: give errors \[B, C, h, w\]"):
        masked_errors(torch.ones(shape), {"mask": torch.ones(2, 1, 8, 8, dtype=torch.uint8)})
