"""How encoders run while a cache is filled, and that everything comes back."""

from __future__ import annotations

import pytest
import torch

from latentcache.models.running import vae_settings
from latentcache.models.tiny import tiny_parts
from latentcache.models.vae import memory_format_of


@pytest.fixture
def vae() -> torch.nn.Module:
    return tiny_parts()["vae"]


def strides(module: torch.nn.Module) -> list[tuple[int, tuple[int, ...]]]:
    return [(id(parameter), parameter.stride()) for parameter in module.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_the_memory_format_stays(vae: torch.nn.Module, dtype: torch.dtype) -> None:
    vae.to(dtype)
    with vae_settings(vae):
        assert memory_format_of(vae) is torch.contiguous_format


def test_half_precision_on_an_accelerator_is_channels_last_inside(
    vae: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meta` stands for an accelerator: its tensors have strides, and no values are needed."""
    vae.to("meta", torch.bfloat16)
    before = strides(vae)
    with pytest.raises(KeyboardInterrupt), vae_settings(vae):
        assert memory_format_of(vae) is torch.channels_last
        raise KeyboardInterrupt
    assert [stride for _, stride in strides(vae)] == [stride for _, stride in before]
    vae.to(torch.float32)
    with vae_settings(vae):
        assert memory_format_of(vae) is torch.contiguous_format
