"""Batches on their way to the requesting device: drawn, scaled and converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import torch

from latentcache.devices.placement import DeviceLike, device_of, dtype_of
from latentcache.errors import StoreError
from latentcache.families.base import CONDITION, MASK
from latentcache.families.scaling import Scaling, latents_from_moments
from latentcache.types import Batch

IMAGE_FIELDS: Final[tuple[str, ...]] = ("moments", "latents")
TEXT_FIELDS: Final[tuple[str, ...]] = ("prompt_embeds", "pooled_prompt_embeds")
FLOAT32_FIELDS: Final[tuple[str, ...]] = ("add_time_ids", "loss_weight")
"""What stays float32 on every device: bfloat16 cannot hold every integer above 256."""
CONTROL: Final = "control_latents_"
"""What the names of control images begin with in a batch; their number follows."""
MASKED: Final = "masked_latents"
"""The latents of the image without what the mask covers."""
_OUTPUTS = ("latents", "moments")


def to_device(
    batch: Batch,
    device: DeviceLike,
    *,
    dtype: torch.dtype | None = None,
    output: Literal["latents", "moments"] = "latents",
    scaling: Scaling | None = None,
    generator: torch.Generator | None = None,
) -> Batch:
    """A gathered batch on the requesting device: see `LatentCache.batch`. `scaling` None leaves latents unscaled.

    The result is the same dictionary where there is nothing to do.
    """
    if output not in _OUTPUTS:
        raise StoreError(f"output is {output!r}; it must be one of {', '.join(_OUTPUTS)}")
    if is_cpu(device) and dtype is None and scaling is None and generator is None:
        stored = batch.get(output)
        if stored is not None and stored.is_cpu:
            return batch  # as it is: a small batch is copied in the time that the rest would take
    target, dtype = device_of(device), dtype or dtype_of(device)
    image = _moments(batch, scaling) if output == "moments" else _latents(batch, target, generator)
    if scaling is not None:
        image = scaling.apply(image.float())
    stored_dtype = next(batch[name].dtype for name in IMAGE_FIELDS if name in batch)
    placed: Batch = {output: image.to(target, dtype or stored_dtype)}
    rest = {name: value for name, value in batch.items() if name not in IMAGE_FIELDS}
    if scaling is not None:
        for name, control in [each for each in rest.items() if each[0].startswith((CONTROL, MASKED, CONDITION))]:
            rest[name] = scaling.apply(control.to(target).float()).to(dtype or control.dtype)
    tensors = {name: value for name, value in rest.items() if isinstance(value, torch.Tensor)}
    return placed | rest | moved(tensors, target, dtype)


def moved(
    tensors: Mapping[str, torch.Tensor], device: DeviceLike, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """The tensors on the requesting device. Those of floating point are in `dtype`, by default the device's own.

    Masks and integers keep their dtype, and so do time ids and the weights of the loss (FLOAT32_FIELDS).
    """
    target, dtype = device_of(device), dtype or dtype_of(device)
    return {
        name: tensor.to(target, dtype if tensor.is_floating_point() and name not in FLOAT32_FIELDS else None)
        for name, tensor in tensors.items()
    }


def _moments(batch: Batch, scaling: Scaling | None) -> torch.Tensor:
    moments: torch.Tensor | None = batch.get("moments")
    if moments is None:
        raise StoreError("this cache holds latents, not moments: set encode.image_output to moments and precache")
    if scaling is not None:
        raise StoreError("moments are stored unscaled: request latents, or leave out scaled=True")
    return moments


def _latents(batch: Batch, target: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    if "moments" in batch:
        return latents_from_moments(batch["moments"].to(target).float(), generator)
    if "latents" not in batch:
        raise StoreError("the batch holds neither moments nor latents")
    if generator is not None:
        raise StoreError("this cache holds latents, which are drawn already: a generator has no effect on them")
    latents: torch.Tensor = batch["latents"]
    return latents.to(target)


def is_cpu(device: DeviceLike) -> bool:
    """Whether it is the CPU by name, which requests no dtype."""
    return device == "cpu" if isinstance(device, str) else isinstance(device, torch.device) and device.type == "cpu"


def unpadded(batch: Batch, name: str) -> list[torch.Tensor]:
    """A text field of a batch as one tensor [L, D] a sample, without padding.

    Args:
        batch: A batch of a `LatentLoader` or of `CachedBatches`.
        name: The field, `prompt_embeds` for instance [B, L, D]. Its mask `<name>_mask`, bool [B, L], says which rows
            are the caption's own; without one all are.

    Returns:
        B tensors.

    Raises:
        KeyError: The batch has no such field.
    """
    values, mask = batch[name], batch.get(f"{name}{MASK}")
    if mask is None:
        return [*values]
    rows = values.view(torch.uint8) if values.itemsize == 1 else values  # torch 2.4 cannot index float8
    return [row[kept].view(values.dtype) for row, kept in zip(rows, mask.bool(), strict=True)]
