"""The tensors of a training run's parts by dotted name, and what a caller declares of them by dotted prefix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar

import numpy as np
import torch

from latentcache.devices.offload import OffloadHook, hooks_by_path
from latentcache.devices.tensor_location import AuditKind
from latentcache.errors import DeviceError
from latentcache.utils.nested import named_leaves, named_tensors

T = TypeVar("T")

PLAIN = (str, bytes, int, float, complex, Path, np.ndarray, np.generic, torch.dtype, torch.device, type(None))
"""What a batch may contain next to tensors: none of it is ever on a device."""


class PartTensor(NamedTuple):
    """One tensor of a part, its dotted name in the part, and the offload hook that governs it."""

    part: str
    name: str
    kind: AuditKind
    tensor: torch.Tensor
    hook: OffloadHook | None = None

    @property
    def path(self) -> str:
        """Part and name, dotted."""
        return f"{self.part}.{self.name}" if self.name else self.part


class PrefixMap(Generic[T]):
    """Values by dotted prefix, the longest wins: `unet` is for all of the part, `unet.mid_block` for that block.

    `name` is the caller's argument, for messages. Raises DeviceError for a key that is below none of `parts`.
    """

    def __init__(self, name: str, values: Mapping[str, T] | None, parts: Iterable[str]):
        self._name, self._values = name, dict(values or {})
        self._unmet = {key for key in self._values if key not in parts}
        for key in self._unmet:
            if not any(key.startswith(f"{part}.") for part in parts):
                raise DeviceError(f"{name}[{key!r}]: there is no such part; the parts are {', '.join(parts)}")

    def get(self, path: str) -> T | None:
        """The value of the longest key that is `path` or lies above it, or None."""
        keys = [key for key in self._values if path == key or path.startswith(f"{key}.")]
        self._unmet.difference_update(keys)
        return self._values[max(keys, key=len)] if keys else None

    def check_met(self) -> None:
        """DeviceError for keys that no looked-up path was below: a misspelt name declares nothing."""
        if self._unmet:
            raise DeviceError(f"{self._name}: nothing in the parts is called {', '.join(sorted(self._unmet))}")


def is_optimizer(value: object) -> bool:
    """Whether it has an optimizer's groups and state. DeepSpeed's and accelerate's wrappers have both."""
    return not isinstance(value, torch.nn.Module) and hasattr(value, "param_groups") and hasattr(value, "state")


def is_scaler(value: object) -> TypeGuard[torch.amp.GradScaler]:
    """Whether it is a GradScaler."""
    return isinstance(value, torch.amp.GradScaler)


def is_swapped_in(ema: object) -> bool:
    """Whether an EMA's weights are in the model now: diffusers' EMAModel and torch_ema keep the trained ones then."""
    return any(getattr(ema, name, None) is not None for name in ("temp_stored_params", "collected_params"))


def part_tensors(part: str, value: Any) -> Iterator[PartTensor]:
    """Every tensor of a module, an EMA or a nested batch. Optimizers and GradScalers have rules of their own.

    Raises DeviceError for a part of another kind, which might have tensors that no check would see.
    """
    if isinstance(value, torch.nn.Module):
        yield from _module_tensors(part, value)
    elif hasattr(value, "shadow_params"):
        # `temp_stored_params` are on the CPU on purpose: restore() copies them back from there.
        for name, tensor in named_tensors(list(value.shadow_params), "shadow_params"):
            yield PartTensor(part, name, "ema", tensor)
    elif not (is_optimizer(value) or is_scaler(value)):
        for name, leaf in named_leaves(value, ""):
            if isinstance(leaf, torch.Tensor):
                yield PartTensor(part, name, "batch", leaf)
            elif not (name and isinstance(leaf, PLAIN)):
                raise DeviceError(
                    f"part {f'{part}.{name}' if name else part} is a {type(leaf).__name__}: a part is a module, an "
                    "optimizer, a GradScaler, an EMA, a tensor, or a mapping, list, tuple or dataclass of tensors"
                )


def _module_tensors(part: str, module: torch.nn.Module) -> Iterator[PartTensor]:
    """Tied tensors come once, under their first name."""
    hooks = hooks_by_path(module)
    seen: set[int] = set()
    for path, owner in module.named_modules():
        prefix, hook = (f"{path}." if path else ""), hooks.get(path)
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield PartTensor(part, prefix + name, "parameter", parameter, hook)
                if parameter.grad is not None:
                    yield PartTensor(part, prefix + name, "gradient", parameter.grad, hook)
        for name, buffer in owner.named_buffers(recurse=False):
            if id(buffer) not in seen:
                seen.add(id(buffer))
                yield PartTensor(part, prefix + name, "buffer", buffer, hook)
        for name, tensor in vars(owner).items():
            if isinstance(tensor, torch.Tensor) and tensor.ndim and id(tensor) not in seen and hook is None:
                seen.add(id(tensor))
                yield PartTensor(part, prefix + name, "attribute", tensor)
