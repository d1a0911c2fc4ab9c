"""Moves batches to the requesting device; there latents are drawn, scaled and converted."""

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
"""Fields that stay float32 on every device: bfloat16 cannot represent every integer above 256."""
CONTROL: Final = "control_latents_"
"""Prefix of the batch fields of control images; the image's number follows."""
MASKED: Final = "masked_latents"
"""Batch field with the latents of the image whose masked area was erased."""
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
    """Move a gathered batch to the requesting device; see `LatentCache.batch`. Without `scaling` latents stay unscaled.

    Returns the same dictionary if there is nothing to do.
    """
    if output not in _OUTPUTS:
        raise StoreError(f"output is {output!r}; it must be one of {', '.join(_OUTPUTS)}")
    is_plain_cpu = isinstance(device, str | torch.device) and str(device) == "cpu"
    if is_plain_cpu and dtype is None and scaling is None and generator is None:
        stored = batch.get(output)
        if stored is not None and stored.is_cpu:
            return batch  # the code below would take as long as copying a small batch
    target, dtype = device_of(device), dtype or dtype_of(device)
    image = _moments(batch, scaling) if output == "moments" else _latents(batch, target, generator)
    if scaling is not None:
        image = scaling.apply(image.float())
    stored_dtype = next(batch[name].dtype for name in IMAGE_FIELDS if name in batch)
    placed: Batch = {output: image.to(target, dtype or stored_dtype)}
    rest = {name: value for name, value in batch.items() if name not in IMAGE_FIELDS}
    if scaling is not None:
        for name, value in rest.items():
            if name.startswith((CONTROL, MASKED, CONDITION)):
                rest[name] = scaling.apply(value.to(target).float()).to(dtype or value.dtype)
    tensors = {name: value for name, value in rest.items() if isinstance(value, torch.Tensor)}
    return placed | rest | moved(tensors, target, dtype)


def moved(
    tensors: Mapping[str, torch.Tensor], device: DeviceLike, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Move tensors to the requesting device. Floating-point tensors get `dtype`, by default the requester's own.

    Masks and integers keep their dtype, and so do time ids and loss weights (FLOAT32_FIELDS).
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
        raise StoreError("this cache holds latents, which are already drawn: leave out the generator")
    latents: torch.Tensor = batch["latents"]
    return latents.to(target)


def unpadded(batch: Batch, name: str) -> list[torch.Tensor]:
    """Split a text field of a batch into one tensor [L, D] per sample, without padding.

    Args:
        batch: A batch of a `LatentLoader` or of `CachedBatches`.
        name: The field [B, L, D], for instance `prompt_embeds`. Its mask `<name>_mask`, bool [B, L], marks the rows of
            the caption; without a mask all rows are the caption's.

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
