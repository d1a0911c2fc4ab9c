"""Checks before each forward that its inputs are on the module's device; the error names those that are not."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from latentcache.devices.tensor_location import (
    CPU,
    device_of_values,
    mover_inside,
    movers,
    named_weights,
    offload_hook_of,
    skip_reason,
)
from latentcache.errors import DeviceError, DeviceMismatchError, listed
from latentcache.utils.nested import named_tensors


@contextmanager
def guard(module: torch.nn.Module, *, managed: Iterable[str] = ()) -> Iterator[torch.nn.Module]:
    """Check the devices of all inputs before each forward of the module and its submodules, inside a `with` block.

    Every tensor among the arguments, nested or not, must be on the device of the (sub)module's parameters and buffers;
    0-dim CPU tensors are accepted anywhere. A submodule that is spread over several devices is checked only in its own
    submodules. Inputs that an offload hook will move are not checked. Weights that offload hooks, block swap or layer
    offload move in time do not count for the modules above them. A module that moves its inputs itself is checked like
    any other. The hooks are removed when the block ends, also after an error.

    Args:
        module: The module to check.
        managed: Dotted paths of submodules whose weights are moved by software that is not recognised. They and
            everything below them are not checked.

    Raises:
        DeviceMismatchError: An input is on another device, before any kernel runs. The error names the submodule's
            path and each such argument as in the signature of `forward`.
        DeviceError: `managed` names something that is not a submodule.
    """
    parts, managed = dict(module.named_modules()), set(managed)
    for path in managed:
        if path not in parts:
            raise DeviceError(f"managed: there is no submodule {path!r} in {type(module).__name__}")
    moved = {*managed, *movers(module)}
    unchecked = tuple(f"{path}." if path else "" for path in managed)
    with ExitStack() as hooks:
        for path, part in parts.items():
            if f"{path}.".startswith(unchecked):
                continue
            start = f"{path}." if path else ""
            below = tuple(f"{each.removeprefix(start)}." for each in moved - {path} if each.startswith(start))
            check = partial(_check_inputs, path, below)
            hooks.callback(part.register_forward_pre_hook(check, prepend=True, with_kwargs=True).remove)
        yield module


def _check_inputs(
    path: str, below: tuple[str, ...], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """The forward pre-hook of the submodule at `path`. Weights whose names start with one of `below` do not count."""
    placed = {name: device for name, device in _placed(module).items() if not name.startswith(below)}
    inside = mover_inside(module)
    if inside is not None:
        if inside.device is None:
            return
        placed = {f"{name} (fetched by {inside.name})": inside.device for name in placed}
    devices = set(placed.values())
    hook = offload_hook_of(module)
    if hook is not None:
        # CpuOffload moves inputs only together with the weights: once the weights are there, nothing moves inputs.
        if hook.moves_inputs or devices != {hook.device}:
            return
    elif not devices or (len(devices) > 1 and any(module.children())):
        return
    offenders = [
        (name, tensor)
        for name, tensor in _named_arguments(module, args, kwargs)
        if not _fits_any_device(tensor) and devices != {device_of_values(tensor)}
    ]
    if not offenders:
        return
    by_device: dict[torch.device, str] = {}
    for name, device in placed.items():
        by_device.setdefault(device, name)
    where = ", ".join(f"{name} is on {device}" for device, name in by_device.items())
    name, first = offenders[0]
    found = device_of_values(first)
    expected = next((device for device in by_device if device != found), found)
    who = f"{path} ({type(module).__name__})" if path else type(module).__name__
    raise DeviceMismatchError(
        f"{who}: its {where}; move these inputs there, or the module to them:"
        + listed(_described(*offender) for offender in offenders),
        module=path,
        argument=name,
        found=str(found),
        expected=str(expected),
    )


def _placed(module: torch.nn.Module) -> dict[str, torch.device]:
    """The device of each parameter and buffer that inputs must match."""
    return {
        name: device_of_values(tensor)
        for name, tensor in named_weights(module)
        if device_of_values(tensor).type != "meta" and not _fits_any_device(tensor) and not skip_reason(tensor)
    }


def _named_arguments(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor among the arguments, named as in the signature of `forward`: `hidden_states`, `args.0`, `cond.1`."""
    signature = inspect.signature(module.forward)
    try:
        named = signature.bind(*args, **kwargs).arguments
    except TypeError:  # they do not match the signature: forward itself will raise the error
        named = {"args": args, **kwargs}
    for name, value in named.items():
        gathers = name in signature.parameters and signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        yield from named_tensors(value, "" if gathers else name)


def _fits_any_device(tensor: torch.Tensor) -> bool:
    """Whether it is a 0-dim CPU tensor, which kernels of every device accept as a number."""
    return tensor.ndim == 0 and tensor.device == CPU


def _described(name: str, tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{name} [{', '.join(map(str, tensor.shape))}] {dtype} is on {device_of_values(tensor)}"
