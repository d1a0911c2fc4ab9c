"""Which mixes of devices a CUDA build of torch accepts, operator by operator.

The rules are read from `native_functions.yaml`, from which torch itself is built and which its wheel contains. An
operator marked `device_check: NoCheck` is built on TensorIterator or has its own rule. Every other operator demands one
device for all its tensors, including 0-dim tensors and tensors in lists. TensorIterator's rule is in
`aten/src/ATen/TensorIterator.cpp`, `compute_types`: one 0-dim CPU tensor may meet device tensors, unless it is written
to.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import torch
import yaml

READS_INDICES = frozenset({"index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"})
"""Their indices may stay on the CPU (`aten/src/ATen/native/TensorAdvancedIndexingUtils.h`)."""

COPIES = frozenset({"copy_", "copy", "_to_copy", "_foreach_copy_", "_foreach_copy", "record_stream"})
"""They exist to take tensors on several devices."""

TAKES_CPU_SCALARS = frozenset({"where"})
"""They move every 0-dim CPU tensor to the device themselves."""


class DeviceMismatch(RuntimeError):
    """Tensors of one operator are on devices that CUDA's rules do not let meet."""


def tensors_of(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple]:
    """Every tensor of a call, also in lists, with its argument and whether the operator writes to it."""
    named = [*zip(op._schema.arguments, args, strict=False)]
    by_name = {argument.name: argument for argument in op._schema.arguments}
    named += [(by_name[name], value) for name, value in kwargs.items()]
    for argument, value in named:
        if argument.name == "scalars":
            continue  # foreach operators read these on the CPU, one for each tensor
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor):
                yield argument.name, item, writes


def common_device(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
    """The device that the operator runs on, or None without tensors. Raises DeviceMismatch for an illegal mix."""
    tensors = [*tensors_of(op, args, kwargs)]
    if not tensors:
        return None
    base = op._schema.name.partition("::")[2]
    device = next((tensor.device for _, tensor, _ in tensors if tensor.device.type != "cpu"), tensors[0][1].device)
    if base in COPIES:
        return device
    if base in READS_INDICES:
        _check_indexing(base, tensors)
        return tensors[0][1].device
    scalars_are_free = _full_name(op) in _unchecked_operators() or op.namespace != "aten"
    num_free = 0
    for name, tensor, writes in tensors:
        if tensor.device == device:
            continue
        if scalars_are_free and tensor.dim() == 0 and tensor.device.type == "cpu" and not writes:
            num_free += 1
            if num_free > 1 and base not in TAKES_CPU_SCALARS:
                raise DeviceMismatch("Trying to pass too many CPU scalars to non-CPU kernel!")
            continue
        raise _mismatch(device, tensor, name, base)
    return device


def kernels_of_their_own() -> Iterator[torch._ops.OpOverload]:
    """Operators with a CUDA kernel for which another device would get a composite one.

    Sent straight to the device they are checked as a whole, as on CUDA.
    """
    for entry in _native_functions():
        dispatch = {key.strip() for keys in entry.get("dispatch") or {} for key in keys.split(",")}
        own = "CUDA" in dispatch and any(key.startswith("Composite") for key in dispatch)
        name, _, overload = entry["func"].split("(")[0].partition(".")
        packet = getattr(torch.ops.aten, name, None)
        if packet is None or name == "convolution_backward" or not (own or "structured_delegate" in entry):
            continue
        if (overload or "default") in packet.overloads():
            yield getattr(packet, overload or "default")


def _check_indexing(base: str, tensors: list[tuple]) -> None:
    device = tensors[0][1].device
    for name, tensor, _ in tensors[1:]:
        if tensor.device == device:
            continue
        if name == "indices" and tensor.device.type != "cpu":
            raise DeviceMismatch(
                f"indices should be either on cpu or on the same device as the indexed tensor ({device})"
            )
        if name == "values" and not (tensor.dim() == 0 and tensor.device.type == "cpu"):
            raise _mismatch(device, tensor, name, base)


def _mismatch(device: torch.device, other: torch.Tensor, name: str, base: str) -> DeviceMismatch:
    return DeviceMismatch(
        f"Expected all tensors to be on the same device, but found at least two devices, {device} and "
        f"{other.device}! (when checking argument for argument {name} in method aten::{base})"
    )


def _full_name(op: torch._ops.OpOverload) -> str:
    return op._schema.name.partition("::")[2] + (f".{op._schema.overload_name}" if op._schema.overload_name else "")


@functools.cache
def _unchecked_operators() -> frozenset[str]:
    return frozenset(e["func"].split("(")[0] for e in _native_functions() if e.get("device_check") == "NoCheck")


@functools.cache
def _native_functions() -> list[dict[str, Any]]:
    path = resources.files("torchgen") / "packaged" / "ATen" / "native" / "native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
