"""Snapshots of what a phase changes besides weights: modes, compiled calls, random streams, autocast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from typing_extensions import override

from latentcache.devices.rng import rng_state, set_rng_state

Modules = Mapping[str, torch.nn.Module]
"""Modules by part name."""


def submodules(modules: Modules) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every submodule with its dotted name, which starts with the part."""
    for part, module in modules.items():
        for path, submodule in module.named_modules():
            yield f"{part}.{path}" if path else part, submodule


def parameters(modules: Modules) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every parameter with its dotted name, which starts with the part."""
    for part, module in modules.items():
        for name, parameter in module.named_parameters():
            yield f"{part}.{name}", parameter


class Snapshot:
    """A recorded state that can be restored."""

    def apply(self) -> None:
        """Make the phase's own change of this state, if there is one."""

    def restore(self) -> Iterable[str] | None:
        """Restore the recorded state, and describe what could not be restored, if anything."""
        raise NotImplementedError


class TrainingModes(Snapshot):
    """The training flag of every submodule, and `requires_grad` of every parameter."""

    def __init__(self, modules: Modules):
        self._modes = [(each, each.training) for _, each in submodules(modules)]
        self._trained = [(each, each.requires_grad) for module in modules.values() for each in module.parameters()]

    @override
    def restore(self) -> None:
        for module, training in self._modes:
            module.training = training
        for parameter, is_trained in self._trained:
            if parameter.requires_grad != is_trained:
                parameter.requires_grad = is_trained


class EagerCalls(Snapshot):
    """Compiled submodules, which run eagerly in a phase: each shape of a validation would be compiled anew.

    `module.compile()` sets `_compiled_call_impl`; the wrapper of `torch.compile` sets its own `forward`.
    """

    def __init__(self, modules: Modules):
        self._calls: list[tuple[dict[str, Any], str, Any, Any]] = []
        """Attributes of a module, the name of one, and its compiled and its eager value."""
        # Set in `vars`, because OptimizedModule.__setattr__ sets attributes of the module inside.
        for attributes in (vars(module) for _, module in submodules(modules)):
            if (compiled := attributes.get("_compiled_call_impl")) is not None:
                self._calls.append((attributes, "_compiled_call_impl", compiled, None))
            if (inner := attributes["_modules"].get("_orig_mod")) is not None:
                self._calls.append((attributes, "forward", attributes["forward"], inner.__call__))

    @override
    def apply(self) -> None:
        for attributes, name, _, eager in self._calls:
            attributes[name] = eager

    @override
    def restore(self) -> None:
        for attributes, name, compiled, _ in self._calls:
            attributes[name] = compiled


class BlockSwap(Snapshot):
    """The mode of block swap in a model of musubi-tuner or sd-scripts, switched by the model's own methods.

    In training mode a forward leaves the first blocks on the CPU until its backward, so a second forward without a
    backward fails. A model without these methods, or already in inference mode, is left alone.
    """

    def __init__(self, module: torch.nn.Module):
        names = ("switch_block_swap_for_inference", "switch_block_swap_for_training")
        self._switches: list[Any] = [getattr(module, name, None) for name in names]
        values = (value for _, part in module.named_modules() for value in vars(part).values())
        self._can_switch = all(map(callable, self._switches)) and not any(
            getattr(value, "forward_only", False) is True for value in values
        )
        self._has_switched = False

    @override
    def apply(self) -> None:
        if self._can_switch:
            self._has_switched = True
            self._switches[0]()

    @override
    def restore(self) -> None:
        if self._has_switched:
            self._switches[1]()


class RandomStreams(Snapshot):
    """The states of the global generators of Python, NumPy and torch, on the CPU and on every accelerator."""

    def __init__(self) -> None:
        self._state = rng_state()

    @override
    def restore(self) -> None:
        set_rng_state(self._state)


class ComputeModes(Snapshot):
    """Gradient mode, and the state and dtype of autocast on the CPU and on the device of the phases.

    Autocast's cache is emptied at both ends. Otherwise a phase would use cached casts of the trained weights, and
    training would use casts of the averaged ones, made without gradients.
    """

    def __init__(self, device: torch.device):
        kinds = dict.fromkeys(("cpu", device.type))
        torch.clear_autocast_cache()
        self._has_gradients = torch.is_grad_enabled()
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]

    @override
    def restore(self) -> None:
        # `enter` leaves no_grad by itself, unless Ctrl-C comes before its block begins.
        torch.set_grad_enabled(self._has_gradients)
        torch.clear_autocast_cache()
        for kind, is_enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
