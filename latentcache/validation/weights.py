"""The tensors of a model's parts: where each is, and the values that it must hold again.

Tensors are moved by giving the same Parameter or buffer object other data. So an optimizer keeps its parameters, and
gradients are not touched. While a phase is open the values are held besides: whatever is done to a tensor meanwhile
(moved, cast there and back), it gets its own memory again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

import torch

NUM_SAMPLED = 4
"""Numbers of each tensor that are compared at the end of a phase. What changes weights in place by mistake, such as
fusing a LoRA, changes all of them."""


class Home(NamedTuple):
    """Where a tensor was when a phase began. `spare` is its memory there, where keeping it costs no device memory."""

    device: torch.device
    dtype: torch.dtype
    spare: torch.Tensor | None


class Weights:
    """All parameters and buffers of some parts, by part. Tied tensors count once, under their first name."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]):
        self._tensors = {part: dict(named_weights(module)) for part, module in modules.items()}
        self._values = {id(tensor): tensor.detach() for _, tensor in self._all()}
        self._sample = _sampled(tensor for _, tensor in self._all())

    def homes(self, park: torch.device) -> Homes:
        """Where every tensor is now."""
        return Homes(self, park)

    def place(self, part: str, device: torch.device) -> None:
        """Put every tensor of the part on the device, with the values that it had when this object was made."""
        for tensor in self._tensors[part].values():
            self.put(tensor, device)

    def put(self, tensor: torch.Tensor, device: torch.device, spare: torch.Tensor | None = None) -> None:
        """Put one tensor on the device. `spare` holds its values there already."""
        values = self._values[id(tensor)]
        if values.device != device:
            values = self._values[id(tensor)] = values.to(device) if spare is None else spare
        if not _is_same_memory(tensor, values):
            tensor.data = values

    def values_changed(self) -> Iterator[str]:
        """The tensors whose values are others than when this object was made, as far as a few numbers of each show."""
        now = _sampled(tensor for _, tensor in self._all())
        for (name, _), before, after in zip(self._all(), self._sample, now, strict=True):
            if not torch.equal(before, after):
                yield f"{name}: its values were changed in place"

    def named(self, part: str) -> Mapping[str, torch.Tensor]:
        """The part's tensors by dotted name."""
        return self._tensors[part]

    @property
    def parts(self) -> Iterable[str]:
        return self._tensors.keys()

    def _all(self) -> Iterator[tuple[str, torch.Tensor]]:
        for part, tensors in self._tensors.items():
            yield from ((f"{part}.{name}", tensor) for name, tensor in tensors.items())


class Homes:
    """The device and dtype of every tensor at the beginning of a phase."""

    def __init__(self, weights: Weights, park: torch.device):
        self._weights = weights
        self._homes = {
            part: {
                name: Home(tensor.device, tensor.dtype, tensor.detach() if tensor.device == park else None)
                for name, tensor in weights.named(part).items()
            }
            for part in weights.parts
        }

    def device_of(self, part: str) -> torch.device | None:
        """The part's device, or None if it lay on several or has no tensors."""
        devices = {home.device for home in self._homes[part].values()}
        return devices.pop() if len(devices) == 1 else None

    def restore(self) -> None:
        for part, homes in self._homes.items():
            tensors = self._weights.named(part)
            for name, home in homes.items():
                tensor = tensors[name]
                self._weights.put(tensor, home.device, home.spare)
                if tensor.dtype != home.dtype:
                    # The phase around this one had cast it.
                    tensor.data = tensor.data.to(home.dtype)

    def changes(self) -> Iterator[str]:
        for part, homes in self._homes.items():
            for name, tensor in self._weights.named(part).items():
                device, dtype, _ = homes[name]
                if (tensor.device, tensor.dtype) != (device, dtype):
                    yield f"{part}.{name}: is {tensor.dtype} on {tensor.device}, was {dtype} on {device}"


class Gradients:
    """The gradients that wait for the optimizer. Phases leave them alone; `Module.to` inside of one would not."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]):
        self._kept = [
            (f"{part}.{name}", parameter, parameter.grad, None if parameter.grad is None else parameter.grad.detach())
            for part, module in modules.items()
            for name, parameter in module.named_parameters()
        ]

    def restore(self) -> None:
        for _, parameter, gradient, values in self._kept:
            if gradient is not None and values is not None and not _is_same_memory(gradient, values):
                gradient.data = values
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def changes(self) -> Iterator[str]:
        for name, parameter, gradient, values in self._kept:
            moved = gradient is not None and values is not None and not _is_same_memory(gradient, values)
            if parameter.grad is not gradient or moved:
                yield f"{name}: has another gradient"


def named_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer of a module by dotted name, each object once."""
    yield from chain(module.named_parameters(), module.named_buffers())


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
        pieces.append(values.as_strided((num,), (step,), values.storage_offset()))
    found: dict[int, torch.Tensor] = {}
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, piece in enumerate(pieces):
        groups.setdefault((piece.device, piece.dtype), []).append(number)
    for numbers in groups.values():
        joined = torch.cat([pieces[number] for number in numbers]).cpu()
        parts = joined.view(torch.uint8).split([pieces[n].numel() * joined.element_size() for n in numbers])
        found.update(zip(numbers, parts, strict=True))
    return [found[number] for number in range(len(pieces))]
