"""Where one tensor's values lie, and whether it may be moved: shards, partitions, quantised weights."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

AuditKind: TypeAlias = Literal[
    "parameter", "buffer", "attribute", "gradient", "optimizer state", "orphan",
    "ema", "batch", "scale", "hook", "meta", "dtype", "mode",
]  # fmt: skip
"""What an audit looks at, and what it finds. `attribute` is a tensor that is no buffer, which `.to()` does not move.
`orphan` is a parameter of an optimizer that no model has any more, or one of a model that its optimizer lacks.
`mode` is a train/eval flag."""

IMMOVABLE_PACKAGES = ("bitsandbytes", "torchao", "optimum.quanto", "quanto", "hqq")
"""Packages whose tensor classes keep quantised values and place them themselves."""


def device_of_values(tensor: torch.Tensor) -> torch.device:
    """The device of the values: of this rank's shard for a DTensor, of the partition for a ZeRO-3 parameter."""
    partition = getattr(tensor, "ds_tensor", None)
    if tensor.numel() == 0 and isinstance(partition, torch.Tensor):
        return partition.device
    local = getattr(tensor, "_local_tensor", None)
    return local.device if isinstance(local, torch.Tensor) else tensor.device


def is_partitioned(tensor: torch.Tensor) -> bool:
    """Whether DeepSpeed ZeRO-3 manages the tensor: it is empty, or on another device, between forwards."""
    return hasattr(tensor, "ds_id")


def why_immovable(tensor: torch.Tensor) -> str | None:
    """Why only its own package may move the tensor (it is quantised, paged or streamed), or None if anyone may."""
    for kind in type(tensor).__mro__:
        if kind.__module__.startswith(IMMOVABLE_PACKAGES):
            return f"a {kind.__module__.partition('.')[0]} {type(tensor).__name__}, which its package places"
    if getattr(tensor, "is_paged", False):
        return "paged memory of bitsandbytes, which moves by itself"
    if getattr(tensor, "is_ramtorch", False):
        return "a RamTorch weight, which is streamed from CPU memory"
    return None


def why_left_alone(tensor: torch.Tensor) -> str | None:
    """Why a check of devices skips the tensor (its manager moves it in time for its use), or None if it does not."""
    if is_partitioned(tensor) and tensor.numel() == 0:
        return "partitions of DeepSpeed ZeRO-3, empty between forwards"
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is not None and device_of_values(tensor).type == "cpu" != mesh.device_type:
        return f"shards that FSDP offloads to the CPU and gathers on {mesh.device_type}"
    return why_immovable(tensor)
