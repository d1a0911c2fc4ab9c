"""The tensors of a model's parts: where each is, and the values that it must hold again.

Tensors are moved by giving the same Parameter or buffer object other data. So an optimizer keeps its parameters, and
gradients are not touched. While a phase is open the values are held besides: whatever is done to a tensor meanwhile
(moved, cast there and back), it gets its own memory again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch

NUM_SAMPLED = 4
"""Numbers of each tensor that are compared at the end of a phase. What changes weights in place by mistake, such as
fusing a LoRA, changes all of them."""


class Home(NamedTuple):
    """Where a tensor was when a phase began. `spare` is its memory there, where keeping it costs no device memory."""

    device: torch.device
    dtype: torch.dtype
    spare: torch.Tensor | None


class Values:
    """The memory that each tensor of a model has to hold: its own, or a copy of it where a phase put it.

    All phases that are open share it. So a tensor that one of them parks leaves nothing behind on the device.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def hold(self, tensor: torch.Tensor) -> None:
        """From now on the tensor has to hold what it holds now, if it is not known already."""
        self._held.setdefault(id(tensor), (tensor, tensor.detach()))

    def put(self, tensor: torch.Tensor, device: torch.device, spare: torch.Tensor | None = None) -> None:
        """Put a tensor on the device with the values that it has to hold. `spare` are these, there already."""
        _, values = self._held[id(tensor)]
        # A copy that is made in a caller's inference mode could not be trained with.
        with torch.inference_mode(False):
            if values.device != device:
                values = values.to(device) if spare is None else spare
                self._held[id(tensor)] = tensor, values
            if not _is_same_memory(tensor, values):
                tensor.data = values


class Weights:
    """All parameters and buffers of some modules, and averages of an EMA: where they were when a phase began."""

    def __init__(self, parts: Mapping[str, Any], values: Values, park: torch.device, *, outermost: bool = False):
        self._values = values
        self._tensors: dict[str, list[tuple[str, torch.Tensor, Home]]] = {part: [] for part in parts}
        for part, owner in parts.items():
            for name, tensor in named_weights(owner):
                values.hold(tensor)
                home = Home(tensor.device, tensor.dtype, tensor.detach() if tensor.device == park else None)
                self._tensors[part].append((f"{part}.{name}", tensor, home))
        # A phase inside another leaves the comparison to that one.
        self._sample = _sampled(tensor for _, tensor, _ in self._all()) if outermost else None

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts."""
        return tuple(self._tensors)

    def device_of(self, part: str) -> torch.device | None:
        """The part's device when the phase began, or None if it lay on several or has no tensors."""
        devices = {home.device for _, _, home in self._tensors[part]}
        return devices.pop() if len(devices) == 1 else None

    def place(self, part: str, device: torch.device) -> None:
        """Put every tensor of the part on the device."""
        for _, tensor, _ in self._tensors[part]:
            self._values.put(tensor, device)

    def restore(self) -> None:
        for _, tensor, home in self._all():
            self._values.put(tensor, home.device, home.spare)

    def cast_again(self) -> None:
        """Give back the dtypes that the phase around this one had cast to. A cast tensor has memory of its own."""
        for _, tensor, home in self._all():
            if tensor.dtype != home.dtype:
                tensor.data = tensor.data.to(home.dtype)

    def changes(self) -> Iterator[str]:
        for name, tensor, home in self._all():
            if (tensor.device, tensor.dtype) != (home.device, home.dtype):
                yield f"{name}: is {tensor.dtype} on {tensor.device}, was {home.dtype} on {home.device}"

    def values_changed(self) -> Iterator[str]:
        """The tensors whose values are others than when the phase began, as far as a few numbers of each show."""
        if self._sample is None:
            return
        now = _sampled(tensor for _, tensor, _ in self._all())
        for (name, _, _), before, after in zip(self._all(), self._sample, now, strict=True):
            if not torch.equal(before, after):
                yield f"{name}: its values were changed in place"

    def _all(self) -> Iterator[tuple[str, torch.Tensor, Home]]:
        return chain.from_iterable(self._tensors.values())


class Casts:
    """The dtypes of weights. They are put back when averages are swapped out again, of the values that are kept."""

    def __init__(self, weights: Weights):
        self._weights = weights

    def restore(self) -> None:
        self._weights.cast_again()

    def changes(self) -> Iterator[str]:
        yield from ()  # `Weights` tells them


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
        found.update(zip(numbers, joined.split([pieces[number].numel() for number in numbers]), strict=True))
    return [found[number] for number in range(len(pieces))]
