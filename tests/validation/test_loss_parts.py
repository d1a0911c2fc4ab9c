"""Masks weight the errors of a prediction, whatever layout a family's latents have."""

from __future__ import annotations

import pytest
import torch

from latentcache import masked_errors
from latentcache.errors import StoreError
from latentcache.families.scaling import patchified


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("frames", "dtype"), [(None, torch.float32), (None, torch.float16), (1, torch.bfloat16), (3, torch.float32)]
)
def test_each_error_has_the_weight_of_its_latent(frames: int | None, dtype: torch.dtype) -> None:
    errors = drawn(0, 3, 2, *([frames] if frames else []), 4, 6).to(dtype)
    mask = (drawn(1, 3, 1, 4, 6) * 256).to(torch.uint8)
    found = masked_errors(errors, {"mask": mask})
    assert found.dtype == dtype
    for number in range(3):
        weights = mask[number, 0].to(dtype) / 255
        assert torch.equal(found[number], errors[number] * weights)
    assert torch.equal(masked_errors(errors, {"mask": torch.full_like(mask, 255)}), errors)
    assert masked_errors(errors, {}) is errors
    if frames is None:  # patches as channels: the same numbers, elsewhere
        assert torch.equal(masked_errors(patchified(errors), {"mask": mask}), patchified(found))


@pytest.mark.parametrize("shape", [(2, 16, 64), (2, 4, 4, 8), (1, 4, 8, 8)])
def test_errors_of_another_layout_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(StoreError, match=r"the mask is \[2, 1, 8, 8\]: give errors \[B, C, h, w\]"):
        masked_errors(torch.ones(shape), {"mask": torch.ones(2, 1, 8, 8, dtype=torch.uint8)})
