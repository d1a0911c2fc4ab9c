"""A small training run that uses everything in a checkpoint: dropout, batch norm, three RNGs, AMP, EMA."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.training_utils import EMAModel
from torch.optim import lr_scheduler
from torch.utils._pytree import tree_leaves

from latentcache.checkpoints.checkpoint import CheckpointState, load_checkpoint, save_checkpoint

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "multi-step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 6)],
        milestones=[4],
    ),
}


class Run:
    """Model, optimizer, scheduler, scaler and EMA on a device. Runs with one seed are bit-identical."""

    def __init__(
        self, device: torch.device | str = "cpu", *, seed: int = 0, scheduler: str = "multi-step", **flags: Any
    ):
        self.device = torch.device(device)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.4), torch.nn.Linear(16, 2)
        )
        self.model.to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **{"lr": 0.05, **flags})
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.scaler = torch.amp.GradScaler(self.device.type, growth_interval=2)
        self.ema = EMAModel(self.model.parameters(), decay=0.9)

    @property
    def parts(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "scaler", "ema")
        return {name: getattr(self, name) for name in names}

    def train(self, num_steps: int) -> list[torch.Tensor]:
        """Train, and return the losses on the CPU."""
        losses = []
        for _ in range(num_steps):
            inputs = torch.randn(8, 4) * random.random() + float(np.random.rand())
            loss = self.model(inputs.to(self.device)).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.ema.step(self.model.parameters())
            losses.append(loss.detach().cpu())
        return losses

    def save(self, folder: Path, **values: Any) -> Path:
        return save_checkpoint(folder, **self.parts, **values)

    def load(self, folder: Path, **values: Any) -> CheckpointState:
        return load_checkpoint(folder, **self.parts, **values)

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of every part, copied to the CPU."""
        states = [part.state_dict() for part in self.parts.values()]
        return [leaf.detach().cpu().clone() for leaf in tree_leaves(states) if isinstance(leaf, torch.Tensor)]

    def numbers(self) -> list[Any]:
        """Every other value of every part, and the next draw of each RNG (which advances it)."""
        states = [part.state_dict() for part in self.parts.values()]
        plain = [leaf for leaf in tree_leaves(states) if not isinstance(leaf, torch.Tensor)]
        draws = [random.random(), float(np.random.rand()), torch.rand(()).item()]
        return [*plain, *draws, torch.rand(3, device=self.device).cpu().tolist()]


class Trap:
    """A hostile object: unpickling it calls a function."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in expected]
    different = [index for index, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)]
    assert different == []
