"""The tensors of a model's parts: where each is, and the memory that it gets back.

Tensors are moved by giving the same Parameter or buffer object other data. So an optimizer keeps its parameters, and
gradients are not touched. While a phase is open the memory of each tensor is kept: a tensor that is moved, or cast
there and back, gets its own memory again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch

NUM_SAMPLED = 4
"""Numbers of each tensor that are compared at the end of a phase. Mistakes that change weights in place, such as
fusing a LoRA, change all of them."""


class TensorOrigin(NamedTuple):
    """Where a tensor was when a phase began. `memory` is its memory there, if it was on the device for parked parts."""

    device: torch.device
    dtype: torch.dtype
    memory: torch.Tensor | None


class KeptMemory:
    """The memory that each tensor of a model must have: its own, or a copy of it on the device where a phase put it.

    All open phases share one. So a tensor that one of them parks leaves no copy on the device.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, tensor: torch.Tensor) -> None:
        """From now on the tensor must have the memory that it has now, unless its memory is kept already."""
        self._kept.setdefault(id(tensor), (tensor, tensor.detach()))

    def put(self, tensor: torch.Tensor, device: torch.device, memory: torch.Tensor | None = None) -> None:
        """Put a tensor on the device with the values of its kept memory. `memory` has these values there already."""
        _, values = self._kept[id(tensor)]
        # A copy that is made in a caller's inference mode could not be trained with.
        with torch.inference_mode(False):
            if values.device != device:
                values = values.to(device) if memory is None else memory
                self._kept[id(tensor)] = tensor, values
            if not _is_same_memory(tensor, values):
                tensor.data = values


class Weights:
    """All parameters and buffers of some modules, and averages of an EMA: where they were when a phase began."""

    def __init__(self, parts: Mapping[str, Any], memory: KeptMemory, park: torch.device, *, outermost: bool = False):
        self._memory = memory
        self._tensors: dict[str, list[tuple[str, torch.Tensor, TensorOrigin]]] = {part: [] for part in parts}
        for part, owner in parts.items():
            for name, tensor in named_weights(owner):
                memory.keep(tensor)
                # Only there: keeping it elsewhere would cost memory of the accelerator.
                parked = tensor.detach() if tensor.device == park else None
                origin = TensorOrigin(tensor.device, tensor.dtype, parked)
                self._tensors[part].append((f"{part}.{name}", tensor, origin))
        # A phase inside another leaves the comparison to that one.
        self._sample = _sampled(tensor for _, tensor, _ in self._all()) if outermost else None

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts."""
        return tuple(self._tensors)

    def device_of(self, part: str) -> torch.device | None:
        """The part's device when the phase began, or None if it lay on several or has no tensors."""
        devices = {origin.device for _, _, origin in self._tensors[part]}
        return devices.pop() if len(devices) == 1 else None

    def place(self, part: str, device: torch.device) -> None:
        """Put every tensor of the part on the device."""
        for _, tensor, _ in self._tensors[part]:
            self._memory.put(tensor, device)

    def restore(self) -> None:
        """Put every tensor back on its device, with its own memory."""
        for _, tensor, origin in self._all():
            self._memory.put(tensor, origin.device, origin.memory)

    def restore_dtypes(self) -> None:
        """Restore the dtypes that the phase around this one had cast to. A cast tensor has memory of its own."""
        for _, tensor, origin in self._all():
            if tensor.dtype != origin.dtype:
                tensor.data = tensor.data.to(origin.dtype)

    def changes(self) -> Iterator[str]:
        """The tensors that are on another device, or of another dtype."""
        for name, tensor, origin in self._all():
            if (tensor.device, tensor.dtype) != (origin.device, origin.dtype):
                yield f"{name}: is {tensor.dtype} on {tensor.device}, was {origin.dtype} on {origin.device}"

    def values_changed(self) -> Iterator[str]:
        """The tensors whose values are others than when the phase began, as far as a few numbers of each show."""
        if self._sample is None:
            return
        now = _sampled(tensor for _, tensor, _ in self._all())
        for (name, _, _), before, after in zip(self._all(), self._sample, now, strict=True):
            if not torch.equal(before, after):
                yield f"{name}: its values were changed in place"

    def _all(self) -> Iterator[tuple[str, torch.Tensor, TensorOrigin]]:
        return chain.from_iterable(self._tensors.values())


class WeightDtypes:
    """The dtypes of weights. They are restored after averages were swapped out, because the swap needs kept memory."""

    def __init__(self, weights: Weights):
        self._weights = weights

    def restore(self) -> None:
        """Cast the weights whose dtype is another."""
        self._weights.restore_dtypes()

    def changes(self) -> Iterator[str]:
        """None: `Weights` reports them."""
        yield from ()


class Gradients:
    """The gradients that wait for the optimizer. Phases do not touch them; `Module.to` inside a phase would."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]):
        self._kept = [
            (f"{part}.{name}", parameter, parameter.grad, None if parameter.grad is None else parameter.grad.detach())
            for part, module in modules.items()
            for name, parameter in module.named_parameters()
        ]

    def restore(self) -> None:
        """Give every parameter its gradient again, in its own memory."""
        for _, parameter, gradient, values in self._kept:
            if gradient is not None and values is not None and not _is_same_memory(gradient, values):
                gradient.data = values
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def changes(self) -> Iterator[str]:
        """The parameters with another gradient."""
        for name, parameter, gradient, values in self._kept:
            moved = gradient is not None and values is not None and not _is_same_memory(gradient, values)
            if parameter.grad is not gradient or moved:
                yield f"{name}: has another gradient"


def named_weights(part: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer of a module by dotted name, each object once; of an EMA its averaged weights."""
    if isinstance(part, torch.nn.Module):
        yield from chain(part.named_parameters(), part.named_buffers())
    else:
        yield from ((f"shadow_params.{number}", tensor) for number, tensor in enumerate(part.shadow_params))


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.device, one.dtype, one.data_ptr(), one.shape, one.stride()) == (
        other.device,
        other.dtype,
        other.data_ptr(),
        other.shape,
        other.stride(),
    )


@torch.no_grad()
def _sampled(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The bytes of NUM_SAMPLED numbers of each tensor, spread evenly: on the CPU, with one copy for each device."""
    pieces: list[torch.Tensor] = []
    for tensor in tensors:
        values = tensor.detach()
        num = min(NUM_SAMPLED, values.numel())
        if not (
            values.is_contiguous() or (values.ndim == 4 and values.is_contiguous(memory_format=torch.channels_last))
        ):
            values = values.contiguous()
        # Over the memory, in either order of dimensions: a copy of all weights in channels_last would cost seconds.
        step = max(1, values.numel() // NUM_SAMPLED)
        # As bytes: a surrounding autocast leaves these alone.
        pieces.append(values.as_strided((num,), (step,), values.storage_offset()).contiguous().view(torch.uint8))
    found: dict[int, torch.Tensor] = {}
    groups: dict[torch.device, list[int]] = {}
    for number, piece in enumerate(pieces):
        groups.setdefault(piece.device, []).append(number)
    for numbers in groups.values():
        joined = torch.cat([pieces[number] for number in numbers]).cpu()
        parts = torch.split_with_sizes(joined, [pieces[number].numel() for number in numbers])
        found.update(zip(numbers, parts, strict=True))
    return [found[number] for number in range(len(pieces))]
