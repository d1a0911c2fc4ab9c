"""The parts of a model that phases switch: which modules there are, which can be moved, and which are wrongly given."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from latentcache.checkpoints.parts import unwrapped_module
from latentcache.devices.optimizer import unwrapped
from latentcache.devices.part_tensors import is_optimizer
from latentcache.errors import PhaseError
from latentcache.phases.averaged_weights import is_training
from latentcache.phases.sharding import check_current, check_filled, check_trainable, is_trained, why_not_moved


class ModelParts:
    """Modules by name, and what trains them: `optimizer`, `scaler`, `ema`.

    `wrapped` are the modules as they were given, `modules` the eager ones inside. PhaseError for a module under two
    names, and for an unknown name in `immovable`.
    """

    def __init__(self, parts: Mapping[str, Any], immovable: Collection[str]):
        self.parts = dict(parts)
        self.wrapped = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        self.modules = {name: unwrapped_module(part) for name, part in self.wrapped.items()}
        self.immovable = frozenset(immovable)
        names: dict[int, str] = {}
        for name, module in self.modules.items():
            other = names.setdefault(id(module), name)
            if other != name:
                raise PhaseError(f"{other} and {name} are one module: give it under one name", phase="none")
        unknown = self.immovable - self.modules.keys()
        if unknown:
            raise PhaseError(f"immovable names {sorted(unknown)}; {self.known()}", phase="train")

    def known(self) -> str:
        """The names of the modules, for a message."""
        return f"the modules are {', '.join(self.modules) or 'none'}"

    def trained(self) -> list[str]:
        """The modules that have a parameter to train."""
        return [name for name, module in self.modules.items() if is_trained(module)]

    def why_not_moved(self, name: str) -> str | None:
        """Why phases leave a part where it is, or None if they move it."""
        return "declared immovable" if name in self.immovable else why_not_moved(self.modules[name])

    def movable(self) -> dict[str, torch.nn.Module]:
        """The modules that phases move."""
        return {name: module for name, module in self.modules.items() if self.why_not_moved(name) is None}

    def check_names(self, phase: str, on_device: Collection[str], training: Collection[str]) -> None:
        """PhaseError for a phase that names unknown parts, or trains parts that it parks."""
        known = self.modules.keys() | ({"ema"} if hasattr(self.parts.get("ema"), "shadow_params") else set())
        unknown = ({*on_device} - known) | ({*training} - self.modules.keys())
        if unknown:
            raise PhaseError(f"names {', '.join(sorted(unknown))}; {self.known()}", phase=phase)
        parked = {*training} - {*on_device}
        if parked:
            raise PhaseError(f"trains {', '.join(sorted(parked))}, which it parks: add it to on_device", phase=phase)

    def check_ready(self, phase: str, on_device: Collection[str], *, averaged: bool) -> None:
        """PhaseError for parts that cannot be trained as they are, or have no values to put on the device."""
        check_trainable(phase, self.modules)
        placed = [part for part in on_device if part in self.modules and part not in self.immovable]
        check_filled(phase, {part: self.modules[part] for part in placed})
        averages = self.parts.get("ema") is not None or any(
            is_optimizer(part) and is_training(unwrapped(part)) for part in self.parts.values()
        )
        check_current(phase, self.modules, averaged=averaged and averages)
