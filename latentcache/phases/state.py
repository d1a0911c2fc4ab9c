"""What a phase changes besides the places of weights: modes, compiled calls, random streams, autocast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from typing_extensions import override

from latentcache.devices.rng import rng_state, set_rng_state

Modules = Mapping[str, torch.nn.Module]
"""Modules by the name of the part."""


def submodules(modules: Modules) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every submodule with its dotted name, the part first."""
    for part, module in modules.items():
        for path, submodule in module.named_modules():
            yield f"{part}.{path}" if path else part, submodule


def parameters(modules: Modules) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every parameter with its dotted name, the part first."""
    for part, module in modules.items():
        for name, parameter in module.named_parameters():
            yield f"{part}.{name}", parameter


class Snapshot:
    """Something as it is now, which can be restored."""

    def restore(self) -> None:
        """Put it back as it was."""
        raise NotImplementedError

    def changes(self) -> Iterator[str]:
        """What differs after `restore`, in words: nothing, where setting it cannot fail."""
        yield from ()


class TrainingModes(Snapshot):
    """The training flag of every submodule, and which parameters are trained."""

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
    """Lets compiled submodules run uncompiled: they would be compiled once more for each shape of validation.

    `module.compile()` sets `_compiled_call_impl`; the wrapper of `torch.compile` goes through its own `forward`.
    """

    def __init__(self, modules: Modules):
        self._compiled: list[tuple[torch.nn.Module, str, Any]] = [
            (module, name, vars(module)[name])
            for _, module in submodules(modules)
            for name in _compiled_attributes(module)
        ]

    def apply(self) -> None:
        """Let them run uncompiled from now on."""
        for module, name, _ in self._compiled:
            # Past OptimizedModule.__setattr__, which sets it on the module inside.
            vars(module)[name] = vars(module)["_modules"]["_orig_mod"].__call__ if name == "forward" else None

    @override
    def restore(self) -> None:
        for module, name, value in self._compiled:
            vars(module)[name] = value


class BlockSwap(Snapshot):
    """The mode of block swap in a model of musubi-tuner or sd-scripts, which the model itself switches.

    In training a forward leaves the first blocks on the CPU until its backward: the second one without a backward
    would fail. A model that has no such methods, or is in the mode for inference, is left alone.
    """

    def __init__(self, module: torch.nn.Module):
        names = ("switch_block_swap_for_inference", "switch_block_swap_for_training")
        self._switches: list[Any] = [getattr(module, name, None) for name in names]
        values = (value for _, part in module.named_modules() for value in vars(part).values())
        self._can_switch = all(map(callable, self._switches)) and not any(
            getattr(value, "forward_only", False) is True for value in values
        )
        self._has_switched = False

    def apply(self) -> None:
        """Let forwards follow each other."""
        if self._can_switch:
            self._has_switched = True
            self._switches[0]()

    @override
    def restore(self) -> None:
        if self._has_switched:
            self._switches[1]()


def _compiled_attributes(module: torch.nn.Module) -> Iterator[str]:
    if vars(module).get("_compiled_call_impl") is not None:
        yield "_compiled_call_impl"
    if "_orig_mod" in module._modules:
        yield "forward"


class RandomStreams(Snapshot):
    """The states of Python's, NumPy's and torch's generators, on the CPU and on every accelerator."""

    def __init__(self) -> None:
        self._state = rng_state()

    @override
    def restore(self) -> None:
        set_rng_state(self._state)


class ComputeModes(Snapshot):
    """Gradient mode, and on the CPU and on the device of the phases whether autocast is on, and for which dtype.

    The cache of autocast is emptied at both ends: a phase would validate with casts of the trained weights that it
    holds, training would go on with casts of averaged ones, and without gradients they would cut the graph.
    """

    def __init__(self, device: torch.device):
        kinds = dict.fromkeys(("cpu", device.type))
        torch.clear_autocast_cache()
        self._has_gradients = torch.is_grad_enabled()
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]

    @override
    def restore(self) -> None:
        # `enter` leaves no_grad by itself, unless Ctrl-C comes before its block has begun.
        torch.set_grad_enabled(self._has_gradients)
        torch.clear_autocast_cache()
        for kind, is_enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
