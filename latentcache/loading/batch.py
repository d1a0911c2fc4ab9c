"""A batch that was read, brought to the requesting device: moved, converted, drawn, scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from latentcache.devices.placement import DeviceLike, device_of, dtype_of
from latentcache.errors import StoreError
from latentcache.store.stacking import check_output
from latentcache.types import Batch

IMAGE_FIELDS: Final[tuple[str, ...]] = ("moments", "latents")
TEXT_FIELDS: Final[tuple[str, ...]] = ("prompt_embeds", "pooled_prompt_embeds")
OUTPUTS: Final = ("latents", "moments")


@dataclass(frozen=True, slots=True)
class Scaling:
    """What the UNet expects: `(latents - shift_factor) * scaling_factor`, as diffusers' training scripts do it."""

    scaling_factor: float
    shift_factor: float | None

    def apply(self, latents: torch.Tensor) -> torch.Tensor:
        """Scaled latents of the same shape."""
        shifted = latents if self.shift_factor is None else latents - self.shift_factor
        return shifted * self.scaling_factor


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
    if output not in OUTPUTS:
        raise StoreError(f"output is {output!r}; it must be one of {', '.join(OUTPUTS)}")
    if is_cpu(device) and dtype is None and scaling is None and generator is None:
        stored = batch.get(output)
        if stored is not None and stored.is_cpu:
            return batch  # as it is: a small batch is copied in the time that the rest would take
    target, dtype = device_of(device), dtype or dtype_of(device)
    placed: Batch = {}
    for name, value in batch.items():
        if name in IMAGE_FIELDS:
            continue
        if isinstance(value, torch.Tensor):
            value = value.to(target, torch.float32 if name == "add_time_ids" else dtype)
        placed[name] = value
    if output == "moments":
        return {"moments": _moments(batch, scaling).to(target, dtype), **placed}
    latents = _latents(batch, target, generator)
    if scaling is not None:
        latents = scaling.apply(latents.float())
    return {"latents": latents.to(dtype or _image_dtype(batch)), **placed}


def _moments(batch: Batch, scaling: Scaling | None) -> torch.Tensor:
    moments: torch.Tensor | None = batch.get("moments")
    if moments is None:
        raise StoreError("this cache holds latents, not moments: set encode.image_output to moments and precache")
    if scaling is not None:
        raise StoreError("moments are stored unscaled: request latents, or leave out scaled=True")
    return moments


def _latents(batch: Batch, target: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    if "moments" in batch:
        # This imports diffusers, which a reader of latents never needs.
        from latentcache.models.vae import latents_from_moments

        return latents_from_moments(batch["moments"].to(target).float(), generator)
    if "latents" not in batch:
        raise StoreError("the batch holds neither moments nor latents")
    if generator is not None:
        raise StoreError("this cache holds latents, which are drawn already: a generator has no effect on them")
    latents: torch.Tensor = batch["latents"]
    return latents.to(target)


def copy_into(out: Mapping[str, torch.Tensor], batch: Batch) -> Batch:
    """The batch with the tensors of `out` in place of those of the same names, and their values copied to them.

    StoreError for one that does not fit, or that the batch does not have.
    """
    for name, given in out.items():
        value = batch.get(name)
        if value is given:
            continue  # the store has written to it
        if not isinstance(value, torch.Tensor):
            names = ", ".join(name for name, value in batch.items() if isinstance(value, torch.Tensor))
            raise StoreError(f"out[{name!r}]: the batch has no such tensor; it has {names}")
        check_output(name, given, value.dtype, tuple(value.shape), value.device)
        given.detach().copy_(value)
        batch[name] = given
    return batch


def is_cpu(device: DeviceLike) -> bool:
    """Whether it is the CPU by name, which requests no dtype."""
    return device == "cpu" if isinstance(device, str) else isinstance(device, torch.device) and device.type == "cpu"


def _image_dtype(batch: Mapping[str, Any]) -> torch.dtype:
    dtype: torch.dtype = next(batch[name].dtype for name in IMAGE_FIELDS if name in batch)
    return dtype
