"""The tensors that a part holds: a module's parameters, buffers and gradients, an EMA's shadows, a batch's leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from latentcache.devices.audit_report import Kind
from latentcache.devices.offload import OffloadHook, hooks_by_path
from latentcache.errors import DeviceError
from latentcache.utils.nested import named_leaves, named_tensors

PLAIN = (str, bytes, int, float, complex, Path, np.ndarray, np.generic, torch.dtype, torch.device, type(None))
"""What a batch may hold next to tensors: nothing of it is ever on a device."""


class Holding(NamedTuple):
    """One tensor of a part, its dotted name in it, and the offload hook that governs it."""

    part: str
    name: str
    kind: Kind
    tensor: torch.Tensor
    hook: OffloadHook | None = None

    @property
    def path(self) -> str:
        """Part and name, dotted."""
        return f"{self.part}.{self.name}" if self.name else self.part


def is_optimizer(value: Any) -> bool:
    """Whether it has an optimizer's groups and state; DeepSpeed's and accelerate's wrappers have both."""
    return not isinstance(value, torch.nn.Module) and hasattr(value, "param_groups") and hasattr(value, "state")


def is_scaler(value: Any) -> bool:
    """Whether it is a GradScaler."""
    return isinstance(value, torch.amp.GradScaler)


def is_swapped_in(ema: Any) -> bool:
    """Whether an EMA's weights are in the model now: diffusers' EMAModel and torch_ema keep the trained ones then."""
    return any(getattr(ema, name, None) is not None for name in ("temp_stored_params", "collected_params"))


def holdings_of(part: str, value: Any) -> Iterator[Holding]:
    """Every tensor of a module, an EMA or a nested batch. Optimizers and GradScalers have rules of their own.

    Raises DeviceError for a part of another kind, which might hold tensors that nobody would look at.
    """
    if isinstance(value, torch.nn.Module):
        yield from _of_module(part, value)
    elif hasattr(value, "shadow_params"):
        # `temp_stored_params` are on the CPU on purpose: restore() copies them back from there.
        for name, tensor in named_tensors(list(value.shadow_params), "shadow_params"):
            yield Holding(part, name, "ema", tensor)
    elif not (is_optimizer(value) or is_scaler(value)):
        for name, leaf in named_leaves(value, ""):
            if isinstance(leaf, torch.Tensor):
                yield Holding(part, name, "batch", leaf)
            elif not (name and isinstance(leaf, PLAIN)):
                raise DeviceError(
                    f"part {f'{part}.{name}' if name else part} is a {type(leaf).__name__}: a part is a module, an "
                    "optimizer, a GradScaler, an EMA, a tensor, or a mapping, list, tuple or dataclass of tensors"
                )


def _of_module(part: str, module: torch.nn.Module) -> Iterator[Holding]:
    """Tied tensors come once, under their first name."""
    hooks = hooks_by_path(module)
    seen: set[int] = set()
    for path, owner in module.named_modules():
        prefix, hook = (f"{path}." if path else ""), hooks.get(path)
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield Holding(part, prefix + name, "parameter", parameter, hook)
                if parameter.grad is not None:
                    yield Holding(part, prefix + name, "gradient", parameter.grad, hook)
        for name, buffer in owner.named_buffers(recurse=False):
            if id(buffer) not in seen:
                seen.add(id(buffer))
                yield Holding(part, prefix + name, "buffer", buffer, hook)
        for name, tensor in vars(owner).items():
            if isinstance(tensor, torch.Tensor) and tensor.ndim and id(tensor) not in seen and hook is None:
                seen.add(id(tensor))
                yield Holding(part, prefix + name, "attribute", tensor)
