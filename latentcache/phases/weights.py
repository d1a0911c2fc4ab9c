"""Snapshots of a model's tensors: weights, gradients, and averaged weights.

Tensors are moved by assigning `.data` of the same Parameter or buffer, so an optimizer keeps its parameters and
gradients stay untouched. While a phase is open it holds the memory of each tensor, and a tensor that was moved or cast
gets that memory back. Averages of an EMA or a schedule-free optimizer are swapped in and out by its own methods, and
the trained weights are copied back bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from latentcache.devices.optimizer import unwrapped
from latentcache.devices.tensor_location import named_weights, stored_by
from latentcache.errors import PhaseError, add_note
from latentcache.phases.state import Modules, Snapshot, parameters

REPAIR = "Make room, then call Phases.place()"
"""The remedy for a part that could not be moved."""


class CurrentStorage:
    """Maps each tensor to the memory that it must have while phases are open: its own, or the copy a phase made.

    All open phases share one map, so parking a tensor in one of them leaves no copy on the device.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record the tensor's memory, unless an outer phase has done so, and return what is recorded."""
        return self._kept.setdefault(id(tensor), (tensor, tensor.detach()))[1]

    def put_all(self, moves: Sequence[tuple[torch.Tensor, torch.device, torch.Tensor | None]]) -> None:
        """Put tensors on devices, all or none. Their old memory is held until the end, for the way back."""
        before = [self._kept[id(tensor)] for tensor, _, _ in moves]
        try:
            for tensor, device, memory in moves:
                self.put(tensor, device, memory)
        except BaseException:
            for tensor, values in before:
                self.put(tensor, values.device, values)
            raise

    def put(self, tensor: torch.Tensor, device: torch.device, memory: torch.Tensor | None = None) -> None:
        """Put a tensor with its recorded values on the device, in `memory` if these values are there already."""
        _, values = self._kept[id(tensor)]
        if values.device == device and _is_same_memory(tensor, values):
            return
        # A copy made in a caller's inference mode could not be trained.
        with torch.inference_mode(False):
            if values.device != device:
                values = values.to(device) if memory is None else memory
                self._kept[id(tensor)] = tensor, values
            tensor.data = values
            if tensor.is_leaf and tensor.grad is not None and tensor.grad.device != device:
                tensor.grad.data = tensor.grad.to(device)


class Weights(Snapshot):
    """The places of all parameters and buffers of some parts when a phase began."""

    def __init__(self, parts: Modules, memory: CurrentStorage, park: torch.device, pinned: Mapping[str, str]):
        self._memory, self.pinned, self.parts = memory, pinned, tuple(parts)
        self._tensors: dict[str, list[tuple[torch.Tensor, torch.device, torch.Tensor | None]]]
        """By part: each tensor, its device, and its memory there if it is parked."""
        self._tensors = {part: [] for part in parts}
        for part, module in parts.items():
            for _, tensor in named_weights(module):
                # Not the tensor's present memory, which code in an outer phase may have cast. Holding memory on the
                # accelerator would defeat parking.
                values = memory.keep(tensor)
                parked = values if tensor.device == values.device == park else None
                self._tensors[part].append((tensor, tensor.device, parked))
        # `Module.to` keeps Parameter objects, but replaces buffers.
        self._buffers = [
            (module._buffers, dict(module._buffers))
            for part in parts.values()
            for module in part.modules()
            if module._buffers
        ]

    def place(self, part: str, device: torch.device) -> None:
        """Put every tensor of the part on the device, all or none. A pinned part is left alone."""
        if part in self.pinned:
            return
        try:
            self._memory.put_all([(tensor, device, None) for tensor, _, _ in self._tensors[part]])
        except Exception as error:
            add_note(error, f"{part} could not be moved to {device}: all of it is where it was")
            raise

    def restore_buffers(self) -> None:
        """Put back every buffer object that was replaced."""
        for buffers, kept in self._buffers:
            buffers.update(kept)

    @override
    def restore(self) -> list[str]:
        """Put every part back, first those to park, which make room."""
        self.restore_buffers()
        failures = []
        for part in sorted(self.parts, key=lambda part: any(parked is None for _, _, parked in self._tensors[part])):
            try:
                self._memory.put_all(self._tensors[part])
            except Exception as error:
                where = f"All of it stays where it was in the phase. {REPAIR}"
                failures.append(f"{part}: {type(error).__name__}: {error}. {where}")
        return failures


class Gradients(Snapshot):
    """The pending gradients of an accumulation. A phase takes them away, so that code in it cannot change them.

    A backward would add to them, `zero_grad` would clear them, and `Module.to` would cast and move them.
    """

    def __init__(self, modules: Modules):
        # Also of frozen parameters, which code in the phase may unfreeze.
        self._kept = [(parameter, parameter.grad) for _, parameter in parameters(modules)]

    @override
    def apply(self) -> None:
        for parameter, _ in self._kept:
            parameter.grad = None

    @override
    def restore(self) -> None:
        for parameter, gradient in self._kept:
            # They differ if there was no room to bring the weight back; `CurrentStorage.put` will bring both.
            if gradient is not None and gradient.device != parameter.device:
                gradient = gradient.to(parameter.device)
            parameter.grad = gradient
        self._kept.clear()  # an error that names what has no room must not hold on to memory


class Averages(Snapshot):
    """Averaged weights that a phase swaps in, and copies of the trained ones, which it puts back bit by bit.

    An EMA's own `store` would not do: a trainer's validation inside the phase may call it too. Nor would `train()` of
    an optimizer: it interpolates back, which rounds.
    """

    _trained: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    def _keep(self, parameters: Sequence[torch.Tensor]) -> None:
        self._trained = [(parameter, parameter.detach().to("cpu", copy=True)) for parameter in parameters]

    def _put_back(self) -> None:
        with torch.no_grad():
            for parameter, values in self._trained:
                parameter.data.copy_(values)


class EmaWeights(Averages):
    """The weights of an EMA with the methods of diffusers' EMAModel: `store`, `copy_to` and `restore`.

    Averages that code in the phase swapped in are swapped out at its end too. An EMA that does not fit raises
    PhaseError if it is `needed`; otherwise it is left alone.
    """

    def __init__(self, ema: Any, parameters: Sequence[torch.nn.Parameter], *, needed: bool):
        self._ema, self._stored, self._needed = ema, stored_by(ema), needed
        self._was_in = self._is_in()
        self._parameters: list[torch.nn.Parameter] = []
        reason = ema_mismatch(ema, parameters)
        if self._was_in:
            return
        if reason is None:
            is_whole = len(ema.shadow_params) == len(parameters)
            self._parameters = [parameter for parameter in parameters if is_whole or parameter.requires_grad]
        elif needed:
            raise PhaseError(reason, phase="validate")

    @override
    def apply(self) -> None:
        if self._needed and not self._was_in:
            self._keep(self._parameters)
            self._ema.copy_to(self._parameters)

    @override
    def restore(self) -> list[str]:
        try:
            stored = stored_by(self._ema)
            if self._parameters and stored is not None and stored is not self._stored:
                self._ema.restore(self._parameters)
        finally:
            self._put_back()
        is_in = self._is_in()
        return [] if is_in == self._was_in else [f"ema: its weights are {'in' if is_in else 'no longer in'} the model"]

    def _is_in(self) -> bool:
        # Not `stored_by`, because torch_ema keeps what it stored for good.
        return getattr(self._ema, "temp_stored_params", None) is not None


class ScheduleFreeMode(Averages):
    """The mode of a schedule-free optimizer. In eval mode the parameters hold the averaged weights."""

    def __init__(self, optimizer: Any, *, needed: bool):
        # Of any class: schedulefree's wrapper around other optimizers is not a torch.optim.Optimizer.
        self._optimizer, self._needed = unwrapped(optimizer), needed
        self._was_training = is_training(self._optimizer)
        self._modes: list[dict[str, Any]] = []

    @override
    def apply(self) -> None:
        if self._needed and self._was_training:
            self._keep([parameter for group in self._optimizer.param_groups for parameter in group["params"]])
            self._modes = train_modes(self._optimizer)
            self._optimizer.eval()

    @override
    def restore(self) -> list[str]:
        # Not by `train()`, which needs state and parameters on one device: the parameters may be parked.
        for holder in self._modes:
            holder["train_mode"] = True
        self._put_back()
        now = is_training(self._optimizer)
        return [] if now == self._was_training else [f"optimizer: is in {'train' if now else 'eval'} mode"]


def ema_mismatch(ema: Any, parameters: Sequence[torch.nn.Parameter]) -> str | None:
    """Why the EMA's weights cannot be put into these parameters, or None."""
    missing = [name for name in ("store", "copy_to", "restore") if not callable(getattr(ema, name, None))]
    missing += [] if hasattr(ema, "shadow_params") else ["shadow_params"]
    if missing:
        return (
            f"the ema is a {type(ema).__name__} without {', '.join(missing)}; use one like diffusers' EMAModel, or "
            "swap its weights in yourself and leave ema out of the parts"
        )
    num_trained = sum(parameter.requires_grad for parameter in parameters)
    num_averaged = len(ema.shadow_params)
    if num_averaged in (len(parameters), num_trained):
        return None
    return (
        f"the ema averages {num_averaged} parameters, but the denoiser has {len(parameters)}, {num_trained} of them "
        "trained; build it over all of them or over the trained ones"
    )


def is_training(optimizer: Any) -> bool:
    """Whether a schedule-free optimizer is in train mode; False for optimizers without modes."""
    return bool(train_modes(optimizer)) and callable(getattr(optimizer, "train", None))


def train_modes(optimizer: Any) -> list[dict[str, Any]]:
    """The dicts with a true `train_mode`: the groups of schedulefree's optimizers, the attributes of its wrapper."""
    return [holder for holder in (vars(optimizer), *optimizer.param_groups) if holder.get("train_mode")]


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = ((t.device, t.dtype, t.data_ptr(), t.shape, t.stride()) for t in (one, other))
    return first == second
