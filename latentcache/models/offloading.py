"""Text encoders on the device: whole where they fit, else as many layers as fit, and the others one after the other."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.hooks import remove_hook_from_submodules

from latentcache.devices.placement import device_of, free_memory, in_eval_mode, out_of_memory_error, placed
from latentcache.errors import DeviceError
from latentcache.models.running import free_cached_memory

WEIGHTS_SHARE = 0.8
"""Of the free memory that weights may take. The rest is for what the layers compute."""


@contextmanager
def encoders_placed(encoders: Mapping[str, torch.nn.Module], device: torch.device) -> Iterator[dict[str, str]]:
    """The encoders ready to run on `device`, in eval mode; all is as it was afterwards, to the very parameters.

    Yields, for each that is not there as a whole, its placement and the reason. The smallest are placed first. Weights
    that stay on the CPU are copied for each batch, layer by layer (accelerate's `dispatch_model`): the same values, to
    the last bit, in more time. An encoder that is dispatched already is left as it is. DeviceError where not even its
    first layer fits.
    """
    notes: dict[str, str] = {}
    with ExitStack() as stack:
        for name, encoder in sorted(encoders.items(), key=lambda item: weight_bytes(item[1])):
            if hasattr(encoder, "hf_device_map"):
                continue
            free_bytes = _free_bytes(encoder, device)
            if free_bytes is None:
                stack.enter_context(placed(encoder, device))
                continue
            left = stack.enter_context(_dispatched(encoder, device, int(free_bytes * WEIGHTS_SHARE)))
            notes[name] = (
                f"{device} layer by layer: {left / 1e9:.3g} of {weight_bytes(encoder) / 1e9:.3g} GB of its weights "
                f"stay on the CPU and are copied for each batch, because {free_bytes / 1e9:.3g} GB are free on {device}"
            )
        yield notes


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of the weights and buffers; tied ones count once."""
    return sum(tensor.nbytes for tensor in chain(module.parameters(), module.buffers()))


def _free_bytes(encoder: torch.nn.Module, device: torch.device) -> int | None:
    """The free memory of a device that is too small for this encoder on the CPU; None if it fits, or is not there."""
    if device.type == "cpu" or device_of(encoder).type != "cpu":
        return None
    free_bytes = free_memory(device)
    if free_bytes is None or weight_bytes(encoder) <= free_bytes * WEIGHTS_SHARE:
        return None
    free_cached_memory(device)
    free_bytes = free_memory(device)
    return None if free_bytes is None or weight_bytes(encoder) <= free_bytes * WEIGHTS_SHARE else free_bytes


@contextmanager
def _dispatched(encoder: torch.nn.Module, device: torch.device, budget: int) -> Iterator[int]:
    """The encoder with `budget` bytes of its weights on `device`; yields how many bytes stay on the CPU.

    accelerate puts other Parameter objects in the place of the encoder's own, which are kept and put back.
    """
    whole: Any = getattr(encoder, "_no_split_modules", None) or []  # residuals cross their layers: these stay together
    # accelerate names an accelerator by its number alone: 0 stands for `device`.
    # Buffers, a few kilobytes, are on the device in any case: `offload_buffers` is to leave them out of the account.
    sizes: Any = {0: budget, "cpu": sys.maxsize}
    found = infer_auto_device_map(encoder, sizes, no_split_module_classes=list(whole), offload_buffers=True)
    device_map = {name: device if place == 0 else place for name, place in found.items()}
    if device not in device_map.values():
        raise DeviceError(
            f"{type(encoder).__name__} cannot run on {device}, not even layer by layer: its first layer and its "
            f"largest one need more than {budget / 1e9:.3g} GB. Free memory there, or set encode.device: cpu"
        )
    own = [(part, dict(part._parameters), dict(part._buffers)) for part in encoder.modules()]
    with in_eval_mode(encoder):
        try:
            try:
                dispatch_model(encoder, device_map, main_device=device)
            except torch.OutOfMemoryError as error:
                raise out_of_memory_error(encoder, device) from error
            on_device = sum(t.nbytes for t in chain(encoder.parameters(), encoder.buffers()) if t.device == device)
            yield weight_bytes(encoder) - on_device
        finally:
            remove_hook_from_submodules(encoder)
            encoder.__dict__.pop("hf_device_map", None)
            for part, parameters, buffers in own:
                part._parameters.update(parameters)
                part._buffers.update(buffers)
