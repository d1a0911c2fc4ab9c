"""Batches: the memory that they are read into, and their way to the requesting device, drawn, scaled and converted."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final, Literal

import numpy as np
import torch

from latentcache.devices.placement import DeviceLike, device_of, dtype_of
from latentcache.devices.transfer import HostMemory
from latentcache.errors import StoreError
from latentcache.families.scaling import Scaling, latents_from_moments
from latentcache.store.batch import Empty, check_output
from latentcache.store.entry import ALIGNMENT
from latentcache.types import Batch

IMAGE_FIELDS: Final[tuple[str, ...]] = ("moments", "latents")
TEXT_FIELDS: Final[tuple[str, ...]] = ("prompt_embeds", "pooled_prompt_embeds")
CONTROL: Final = "control_latents_"
"""What the names of control images begin with in a batch; their number follows."""
_OUTPUTS = ("latents", "moments")


class BufferPool:
    """Host memory that batches are read into again and again: fresh memory costs a page fault every 4 KiB.

    A buffer is free when no array or tensor shares its memory any more: no view, and none that autograd saved. So who
    has a tensor keeps it valid, and the next batch is written elsewhere: nobody waits for a buffer. At most `num_kept`
    buffers are kept. `pin` requests pinned ones. Any thread may borrow.
    """

    def __init__(self, *, pin: bool = False, num_kept: int = 4):
        self.requested_pin = pin
        self.num_allocated = 0
        self._host = HostMemory(pin=pin)
        # Each with a reference to the array that was borrowed of it, which is dead when the buffer is free.
        self._buffers: deque[tuple[np.ndarray, weakref.ref[np.ndarray]]] = deque(maxlen=num_kept)
        self._num_bytes = 0

    def borrow(self, sizes: Iterable[int]) -> Empty:
        """A buffer for arrays of so many bytes each. The result makes these arrays, each on ALIGNMENT bytes."""
        # All buffers have the size of the largest batch so far, so that any of them will do for the next one.
        # Kept in a variable too: another thread, which borrows less, may set it meanwhile.
        num_bytes = self._num_bytes = max(self._num_bytes, sum([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]))
        buffer = self._free_buffer(num_bytes)
        # The arrays refer to this one: numpy passes over arrays whose own base is an array, and this one's is not.
        borrowed = np.frombuffer(buffer.data, np.uint8)
        self._buffers.append((buffer, weakref.ref(borrowed)))
        start = 0

        def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            nonlocal start
            array = np.ndarray(shape, dtype, borrowed, start)
            start += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
            return array

        return empty

    def _free_buffer(self, size: int) -> np.ndarray:
        for _ in range(len(self._buffers)):
            try:
                buffer, borrowed = self._buffers.pop()
            except IndexError:  # another thread has taken it
                break
            if borrowed() is not None:
                self._buffers.appendleft((buffer, borrowed))
            elif buffer.nbytes >= size:
                return buffer
        self.num_allocated += 1
        return self._host.empty((size,), torch.uint8).numpy()

    @property
    def pin(self) -> bool:
        """Whether new buffers are pinned: as requested, unless pinning failed."""
        return self._host.pin


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
        for name, control in [each for each in rest.items() if each[0].startswith(CONTROL)]:
            rest[name] = scaling.apply(control.to(target).float()).to(dtype or control.dtype)
    tensors = {name: value for name, value in rest.items() if isinstance(value, torch.Tensor)}
    return placed | rest | moved(tensors, target, dtype)


def moved(
    tensors: Mapping[str, torch.Tensor], device: DeviceLike, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """The tensors on the requesting device. Those of floating point are in `dtype`, by default the device's own.

    Masks and integers keep their dtype, and so do time ids: bfloat16 cannot hold every integer above 256.
    """
    target, dtype = device_of(device), dtype or dtype_of(device)
    return {
        name: tensor.to(target, dtype if tensor.is_floating_point() and name != "add_time_ids" else None)
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
