"""Resolves requesting devices and their dtypes, sizes the VAE's batches, and moves encoders to a device and back."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import torch

from latentcache.devices.tensor_location import casting_dtype_of, named_weights, offload_hook_of, with_index
from latentcache.errors import DeviceError


def current_accelerator(*, built_for: bool = False) -> torch.device | None:
    """This machine's accelerator, without an index, or None. `built_for`: also the one that torch's build is for."""
    if not hasattr(torch, "accelerator"):  # before torch 2.6
        found = torch._C._get_accelerator()
        is_here = found.type != "cpu" and (built_for or torch.get_device_module(found).is_available())
        return found if is_here else None
    if not built_for and not torch.accelerator.is_available():
        return None
    try:
        return torch.accelerator.current_accelerator()  # the argument check_available is new in torch 2.7
    except RuntimeError:  # torch 2.6 built without an accelerator
        return None


DeviceLike: TypeAlias = "torch.device | str | torch.Tensor | torch.nn.Module"
"""Identifies the requesting device: a device, its name, or a tensor or module on it."""

VAE_CHANNELS = 128
"""Channels of an AutoencoderKL's encoder at full resolution."""
VAE_BYTES_PER_PIXEL = VAE_CHANNELS * 5
"""Peak activations of an AutoencoderKL's encoder, in elements per pixel: about five copies of VAE_CHANNELS live at once
(input, norm, activation, convolution output and workspace). Only an initial estimate: a batch that does not fit is
halved."""
MAX_ELEMENTS = 2**31 - 1
"""Most elements of a tensor in a VAE batch. cuDNN before 9.3 rejects larger ones with an error that is not an OOM."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A device, a dtype, a batch size, and the reason for them."""

    device: torch.device
    dtype: torch.dtype
    batch_size: int
    reason: str


def device_named(name: str, local_rank: int | None = None) -> torch.device:
    """The device of this name, with an index; `auto` is the accelerator if there is one, else the CPU.

    If the name has no index, `local_rank` selects the accelerator: index 0 if the process sees only one. Without
    `local_rank` it is the current accelerator. Raises DeviceError for unknown names and for devices that this machine
    does not have.
    """
    if name == "auto":
        name = str(current_accelerator() or "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"device {name!r} is unknown; use auto, cpu, cuda, cuda:1, mps, xpu, ...") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "meta":
        raise DeviceError("device 'meta' holds no values: name the device that the model runs on")
    module = torch.get_device_module(device)
    if not module.is_available():
        have = current_accelerator()
        raise DeviceError(f"device {name!r} is not available here; there is {have or 'only the CPU'}")
    if device.index is None and local_rank is not None:
        # If a launcher shows each process a single device, its index is 0 in every rank.
        device = torch.device(device.type, local_rank if module.device_count() > 1 else 0)
    if device.index is not None and device.index >= module.device_count():
        raise DeviceError(f"device {device} does not exist: this machine has {module.device_count()} of that type")
    return with_index(device)


def device_of(requester: DeviceLike) -> torch.device:
    """The requesting device. For a module under an offload hook it is the hook's execution device.

    Raises DeviceError for a module whose tensors are on several devices or on `meta`, and for one without tensors.
    """
    if isinstance(requester, torch.Tensor):
        if requester.device.type == "meta":
            raise DeviceError("tensor is on meta and holds no values: name the device instead")
        return requester.device
    if not isinstance(requester, torch.nn.Module):
        return device_named(str(requester))
    hook = next(filter(None, map(offload_hook_of, requester.modules())), None)
    if hook is not None and hook.device is not None:
        # The parameters are on the CPU or on meta at present: only the hook knows where the forward will run.
        return hook.device
    first: dict[torch.device, str] = {}
    for name, tensor in named_weights(requester):
        first.setdefault(tensor.device, name)
    if not first:
        raise DeviceError(f"{type(requester).__name__} has no parameters and no buffers: name the device instead")
    if len(first) > 1:
        found = ", ".join(f"{name} on {device}" for device, name in first.items())
        raise DeviceError(f"{type(requester).__name__} is on {len(first)} devices ({found}): move it to one first")
    device, name = next(iter(first.items()))
    if device.type == "meta":
        raise DeviceError(f"{type(requester).__name__}.{name} is on meta and holds no values: load the module first")
    return device


def dtype_of(requester: DeviceLike) -> torch.dtype | None:
    """The floating-point dtype that the requester computes in, or None if it has none (a device, an integer tensor).

    8-bit floats are for storage alone, so such tensors are ignored, and so are weights that a class always keeps in
    float32, such as Wan's first one. diffusers' `enable_layerwise_casting` records the dtype that its module computes
    in.
    """
    if isinstance(requester, torch.Tensor):
        return requester.dtype if _computes(requester) else None
    if isinstance(requester, torch.nn.Module):
        modules = [*requester.modules()]
        kept = {name for each in {*map(type, modules)} for name in getattr(each, "_keep_in_fp32_modules", None) or ()}
        casting = filter(None, map(casting_dtype_of, modules))
        return next(chain(casting, _dtypes(requester, kept), _dtypes(requester, set())), None)
    return None


def _dtypes(module: torch.nn.Module, kept: Set[str]) -> Iterator[torch.dtype]:
    """The dtypes of the tensors that a module computes with, without those whose path has one of the names `kept`."""
    named = named_weights(module)
    return (tensor.dtype for name, tensor in named if _computes(tensor) and kept.isdisjoint(name.split(".")))


def _computes(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def vae_batch_size(
    device: torch.device, dtype: torch.dtype, num_pixels: int, requested: int | None = None
) -> tuple[int, str]:
    """The VAE's batch size for images of up to `num_pixels`, and its reason: `requested`, or what fits into memory.

    On an accelerator MAX_ELEMENTS is an upper bound, since the error beyond it does not trigger a smaller batch.
    """
    if requested is not None:
        size, reason = requested, f"batch_size is {requested}"
    elif device.type == "cpu":
        size, reason = 1, "on a CPU batches are no faster, and alone an image's bits do not depend on others"
    elif (free_bytes := free_memory(device)) is None:
        size, reason = 1, f"{device} does not report how much memory is free"
    else:
        image_bytes = num_pixels * VAE_BYTES_PER_PIXEL * dtype.itemsize
        size = max(1, min(16, int(free_bytes * 0.8) // image_bytes))
        reason = f"about {image_bytes / 1e9:.1f} GB each, {free_bytes / 1e9:.1f} GB free on {device}"
    most = max(1, MAX_ELEMENTS // (VAE_CHANNELS * num_pixels))
    if device.type != "cpu" and size > most:
        size, reason = most, f"{reason}, but {size} of {num_pixels} pixels each need tensors of 2**31 elements or more"
    return size, f"{size} image{'s' if size > 1 else ''}: {reason}"


def free_memory(device: torch.device) -> int | None:
    """Free bytes on an accelerator, including what torch's allocator has cached; None if the backend does not say."""
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    free: int = module.mem_get_info(device)[0]
    if hasattr(module, "memory_reserved") and hasattr(module, "memory_allocated"):
        free += module.memory_reserved(device) - module.memory_allocated(device)
    return free


@contextmanager
def placed(module: torch.nn.Module, device: torch.device) -> Iterator[torch.nn.Module]:
    """The module on `device` and in eval mode; its own device and every training flag are restored afterwards.

    A module under an offload hook goes to the hook's device; if its hooks move it piece by piece, it is not moved.
    Weights are copied back even though they have not changed. Keeping the originals would take host memory meanwhile
    (9.5 GB for a T5-XXL), and a run moves each encoder only once.
    """
    hook = next(filter(None, map(offload_hook_of, module.modules())), None)
    with in_eval_mode(module):
        if hook is not None and hook.moves_inputs:
            yield module
            return
        home = device_of(module) if hook is None else next(module.parameters()).device
        try:
            try:
                module.to(device if hook is None else hook.device)
            except torch.OutOfMemoryError as error:
                raise out_of_memory_error(module, device) from error
            yield module
        finally:
            module.to(home)


@contextmanager
def in_eval_mode(module: torch.nn.Module) -> Iterator[None]:
    """Put the module in eval mode, and restore every training flag afterwards."""
    training = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for part, flag in training:
            part.training = flag


def out_of_memory_error(module: torch.nn.Module, device: torch.device) -> DeviceError:
    """The error for a module that is larger than the free memory of a device."""
    return DeviceError(
        f"{type(module).__name__} does not fit into the free memory of {device}: "
        "free some, use a smaller dtype (encode.vae_dtype, encode.text_dtype), or encode.device: cpu"
    )
