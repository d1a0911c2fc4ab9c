"""Offload hooks of accelerate and diffusers: where a hooked module runs, and whether the hook moves its weights."""

from __future__ import annotations

from typing import NamedTuple

import torch


class OffloadHook(NamedTuple):
    """A hook's execution device; whether it moves the weights there and back, and whether it moves the inputs too."""

    execution_device: torch.device
    moves_weights: bool
    moves_inputs: bool


def offload_hook_of(module: torch.nn.Module) -> OffloadHook | None:
    """The offload hook on this module itself, or None. Hooks are recognised by their attributes: nothing is imported.

    accelerate keeps one in `_hf_hook`, alone or in a SequentialHook; diffusers' group offloading keeps its own in
    a registry in `_diffusers_hook`.
    """
    hook = getattr(module, "_hf_hook", None)
    for single in getattr(hook, "hooks", (hook,)):
        device = getattr(single, "execution_device", None)
        if device is not None:
            # AlignDevicesHook has `offload`, whether it moves weights, and always moves inputs. CpuOffload has no such
            # field: it moves the weights, and the inputs only when the weights are not there already.
            aligns = hasattr(single, "offload")
            moves_weights = not aligns or bool(getattr(single, "offload", False))
            return OffloadHook(numbered(torch.device(device)), moves_weights, aligns)
    registry = getattr(module, "_diffusers_hook", None)
    for single in getattr(registry, "hooks", {}).values():
        device = getattr(getattr(single, "group", None), "onload_device", None)
        if device is not None:
            return OffloadHook(numbered(torch.device(device)), True, True)
    return None


def casting_dtype_of(module: torch.nn.Module) -> torch.dtype | None:
    """The dtype that this module itself computes in under diffusers' layerwise casting, or None without it."""
    registry = getattr(module, "_diffusers_hook", None)
    found = (getattr(single, "compute_dtype", None) for single in getattr(registry, "hooks", {}).values())
    return next((dtype for dtype in found if isinstance(dtype, torch.dtype)), None)


def hooks_by_path(module: torch.nn.Module) -> dict[str, OffloadHook]:
    """The hook that governs each submodule, by dotted path: its own, else that of the nearest parent with one."""
    governing: dict[str, OffloadHook] = {}
    for path, part in module.named_modules():
        hook = offload_hook_of(part) or (governing.get(path.rpartition(".")[0]) if path else None)
        if hook is not None:
            governing[path] = hook
    return governing


def numbered(device: torch.device) -> torch.device:
    """The device with its number, as tensors have it: `cuda` is the current cuda device."""
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    if device.index is not None:
        return device
    current_device = getattr(torch.get_device_module(device), "current_device", None)
    return torch.device(device.type, 0 if current_device is None else current_device())


def replaces_parameters(module: torch.nn.Module) -> bool:
    """Whether an offload hook on this module itself puts other Parameter objects in the place of its own.

    accelerate's AlignDevicesHook with `offload` does: `enable_sequential_cpu_offload` and `cpu_offload` install it. An
    optimizer that was built before continues to train the old objects, which nothing uses any more.
    """
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(single, "offload", False) is True for single in getattr(hook, "hooks", (hook,)))
