"""A small SDXL training run for tests of phases, with dropout, every generator, an EMA, LoRA, or a GradScaler."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import schedulefree
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import EMAModel
from peft import LoraConfig
from torch.utils._pytree import tree_leaves

from latentcache.models.tiny import tiny_denoiser, tiny_parts
from latentcache.phases.phases import Phases

NUM_STEPS = 3
VALIDATE_AFTER = 1
VARIANTS = ("plain", "ema", "lora", "amp", "schedule-free", "text-encoder")
SIDE = 8
HIDDEN_SIZE, HIDDEN_SIZE_2 = 32, 40
"""Widths of the tiny model's text encoders."""


SMALL = {
    "block_out_channels": (16, 32),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (2, 4),
    "transformer_layers_per_block": 1,
    "dropout": 0.2,
}
"""SDXL's structure in the smallest size that still has every kind of block, with dropout."""


class Training:
    """The run. Two runs of one class, variant and device are bit-identical unless something disturbs them."""

    def __init__(self, device: torch.device, variant: str = "plain"):
        self.device, self.variant = device, variant
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        self.unet: Any = UNet2DConditionModel.from_config({**tiny_denoiser().config, **SMALL}).train()
        self.parts: dict[str, Any] = tiny_parts() | {"unet": self.unet}
        if variant == "lora":
            settings = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.1, "init_lora_weights": "gaussian"}
            self.unet.requires_grad_(False)
            self.unet.add_adapter(LoraConfig(target_modules=["to_q", "to_v"], **settings))
        if variant == "text-encoder":
            self.parts["text_encoder"].requires_grad_(True)
        trained = [m for m in self.modules().values() if any(p.requires_grad for p in m.parameters())]
        for module in trained:
            module.to(device)
        self.wrap()
        parameters = [p for m in self.modules().values() for p in m.parameters() if p.requires_grad]
        self.optimizer = self.parts["optimizer"] = self.optimizer_over(parameters)
        self.ema = EMAModel(parameters, decay=0.5) if variant == "ema" else None
        if self.ema is not None:
            self.parts["ema"] = self.ema
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, enabled=variant == "amp")
        self.parts["scaler"] = self.scaler
        self.scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
        self.phases = Phases(self.parts, device=device)
        self.phases.start("train")
        numbers = torch.Generator().manual_seed(4)
        self.latents = torch.randn(2, 4, SIDE, SIDE, generator=numbers)
        self.embeddings = torch.randn(2, 77, HIDDEN_SIZE + HIDDEN_SIZE_2, generator=numbers)
        self.pooled = torch.randn(2, HIDDEN_SIZE_2, generator=numbers)
        self.token_ids = torch.randint(0, 500, (2, 77), generator=numbers)
        self.losses: list[float] = []
        self.draws: list[Any] = []
        """A draw from each generator after the run."""

    def wrap(self) -> None:
        """For subclasses: replace the UNet that the loop calls, or the part."""

    def optimizer_over(self, parameters: list[torch.nn.Parameter]) -> Any:
        """Hook for subclasses: make the optimizer."""
        if self.variant == "schedule-free":
            optimizer = schedulefree.AdamWScheduleFree(parameters, lr=1e-2, foreach=False)
            optimizer.train()
            return optimizer
        return torch.optim.AdamW(parameters, lr=1e-2, fused=True)

    def modules(self) -> dict[str, torch.nn.Module]:
        return {name: part for name, part in self.parts.items() if isinstance(part, torch.nn.Module)}

    def trained(self) -> list[torch.nn.Parameter]:
        """The optimizer's parameters."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def predict(self, latents: torch.Tensor, timesteps: torch.Tensor, unet: Any = None) -> torch.Tensor:
        """The output for these latents with the batch's embeddings, by default of the UNet that the loop calls."""
        embeddings = self.embeddings.to(self.device)
        if self.variant == "text-encoder":
            encoded = self.parts["text_encoder"](self.token_ids.to(self.device), output_hidden_states=True)
            embeddings = torch.cat([encoded.hidden_states[-2], embeddings[..., HIDDEN_SIZE:]], -1)
        time_ids = torch.tensor([[64.0, 64, 0, 0, 64, 64]] * 2, device=self.device)
        conditions = {"text_embeds": self.pooled.to(self.device), "time_ids": time_ids}
        return (unet or self.unet)(latents, timesteps, embeddings, added_cond_kwargs=conditions).sample

    def backward(self) -> None:
        """Compute gradients. Noise is drawn on the device, timesteps with NumPy, a flip with Python."""
        latents = self.latents.to(self.device)
        latents = latents.flip(-1) if random.random() < 0.5 else latents
        noise = torch.randn_like(latents) + torch.randn(latents.shape).to(self.device)
        timesteps = torch.from_numpy(np.random.randint(0, 1000, 2)).to(self.device)
        noisy = self.scheduler.add_noise(latents, noise, timesteps)
        with torch.autocast(self.device.type, torch.float16, enabled=self.variant == "amp"):
            loss = F.mse_loss(self.predict(noisy, timesteps).float(), noise.float())
        self.scaler.scale(loss).backward()
        self.losses.append(loss.item())

    def step(self) -> None:
        """Compute gradients and update the weights."""
        self.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=False)
        if self.ema is not None:
            self.ema.step(self.trained())

    def run(self, validate: Callable[[Any], None] | None = None) -> Training:
        """Run all steps, with `validate` after one of them."""
        for number in range(NUM_STEPS):
            self.step()
            if number == VALIDATE_AFTER and validate is not None:
                validate(self)
        on_device = torch.rand(3, device=self.device).cpu().tolist()
        self.draws = [random.random(), float(np.random.rand()), torch.rand(()).item(), on_device]
        return self

    def tensors(self) -> list[torch.Tensor]:
        """Copies of every weight, gradient and optimizer state on the CPU, of shards this rank's own."""
        weights = [tensor for module in self.modules().values() for tensor in module.state_dict().values()]
        gradients = [parameter.grad for parameter in self.trained() if parameter.grad is not None]
        states = [self.optimizer.state_dict(), self.scaler.state_dict(), self.ema.state_dict() if self.ema else {}]
        leaves = [leaf for leaf in tree_leaves(states) if isinstance(leaf, torch.Tensor)]
        own = [getattr(tensor, "_local_tensor", tensor) for tensor in (*weights, *gradients, *leaves)]
        return [tensor.detach().cpu().clone() for tensor in own]
