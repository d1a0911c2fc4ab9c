"""Tiny UNets, with LoRA adapters too, and what it means that two of them, or two models, are the same."""

from __future__ import annotations

import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig

from latentcache.config import ModelConfig
from latentcache.identity import PartIdentity
from latentcache.models.tiny import tiny_denoiser

F16, F32 = torch.float16, torch.float32
TINY = ModelConfig(path="tiny")
PIXELS = torch.arange(2 * 32 * 32 * 3).remainder(251).to(torch.uint8).reshape(2, 32, 32, 3)


def identities(models, dtype: torch.dtype = F32) -> dict[str, PartIdentity]:
    """Of all parts of a model."""
    return {part: models.identity(part, dtype) for part in models.family.parts}


def output(unet: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    dtype = next(unet.parameters()).dtype
    latents, embeds, pooled = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 4, 8, 8), (2, 77, 72), (2, 40))
    )
    conditions = {"text_embeds": pooled, "time_ids": torch.tensor([[64, 64, 0, 0, 64, 64]] * 2)}
    with torch.no_grad():
        return unet(latents, torch.tensor([10, 900]), embeds, added_cond_kwargs=conditions).sample


def check_same(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    """Bit-equal weights and output; on the CPU, in eval mode, frozen."""
    assert not any(module.training for module in found.modules())
    assert not any(parameter.requires_grad for parameter in found.parameters())
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.device.type == "cpu" and value.dtype == theirs[name].dtype
        assert torch.equal(value, theirs[name]), name
    assert torch.equal(output(found), output(expected))


def frozen_unet(seed: int, dtype: torch.dtype = F32) -> UNet2DConditionModel:
    """Frozen, as a loaded one: on the CPU torch takes other float16 kernels for parameters that require grad."""
    return torch.nn.Module.to(tiny_denoiser(seed), dtype).eval().requires_grad_(False)


def adapted_unet(seed: int = 5, **settings) -> UNet2DConditionModel:
    """A UNet with a trained LoRA: both its matrices are random, and alpha is not the rank."""
    unet = frozen_unet(seed)
    unet.add_adapter(LoraConfig(**{"r": 4, "lora_alpha": 10, "target_modules": ["to_q", "conv1"], **settings}))
    randomise(unet)
    return unet


def randomise(unet: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(11)
    for name, parameter in unet.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
