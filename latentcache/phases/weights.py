"""The tensors of a model's parts: where each is, the memory that it gets back, and averages in the place of weights.

Tensors are moved by giving the same Parameter or buffer object other data. So an optimizer keeps its parameters, and
gradients are not touched. While a phase is open the memory of each tensor is kept: a tensor that is moved, or cast
there and back, gets its own memory again. Averages are an EMA's, or those of a schedule-free optimizer: they are
swapped in and out by their own methods, and the trained weights are copied back bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from latentcache.devices.optimizer import unwrapped
from latentcache.devices.tensor_location import is_swapped_in
from latentcache.errors import PhaseError, add_note
from latentcache.phases.state import Modules, Snapshot, parameters

REPAIR = "Make room, then call Phases.place()"
"""What to do when a part could not be moved."""


class CurrentStorage:
    """Maps each tensor to the storage that its `.data` points to while phases are open: its own, or a phase's copy.

    The copy is on the device where a phase put the tensor. All open phases share one map, so a tensor that one of them
    parks leaves no copy on the device.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, tensor: torch.Tensor) -> None:
        """From now on the tensor must have the memory that it has now, unless its memory is kept already."""
        self._kept.setdefault(id(tensor), (tensor, tensor.detach()))

    def put_all(self, moves: Sequence[tuple[torch.Tensor, torch.device, torch.Tensor | None]]) -> None:
        """Put tensors on devices. After an error all are in the memory that they had, which is held until the end."""
        before = [self._kept[id(tensor)] for tensor, _, _ in moves]
        try:
            for tensor, device, memory in moves:
                self.put(tensor, device, memory)
        except BaseException:
            for tensor, values in before:
                self.put(tensor, values.device, values)
            raise

    def put(self, tensor: torch.Tensor, device: torch.device, memory: torch.Tensor | None = None) -> None:
        """Put a tensor on the device with the values of its kept memory. `memory` has these values there already."""
        _, values = self._kept[id(tensor)]
        if values.device == device and _is_same_memory(tensor, values):
            return
        # A copy that is made in a caller's inference mode could not be trained with.
        with torch.inference_mode(False):
            if values.device != device:
                values = values.to(device) if memory is None else memory
                self._kept[id(tensor)] = tensor, values
            tensor.data = values


class Weights(Snapshot):
    """All parameters and buffers of some modules: where they were when a phase began."""

    def __init__(
        self,
        parts: Mapping[str, torch.nn.Module],
        memory: CurrentStorage,
        park: torch.device,
        pinned: Mapping[str, str],
    ):
        self._memory, self.pinned = memory, pinned
        self.failed: dict[str, Exception] = {}
        """The parts that `restore` could not put back."""
        self._tensors: dict[str, list[tuple[torch.Tensor, torch.device, torch.Tensor | None]]]
        """By part: each tensor, its device, and its memory there if it is parked."""
        self._tensors = {part: [] for part in parts}
        for part, module in parts.items():
            for _, tensor in named_weights(module):
                memory.keep(tensor)
                # Only there: keeping it elsewhere would cost memory of the accelerator.
                parked = tensor.detach() if tensor.device == park else None
                self._tensors[part].append((tensor, tensor.device, parked))
        # `Module.to` gives a parameter other data, but puts another tensor in a buffer's place.
        self._buffers = [
            (module._buffers, dict(module._buffers))
            for part in parts.values()
            for module in part.modules()
            if module._buffers
        ]

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts."""
        return tuple(self._tensors)

    def place(self, part: str, device: torch.device) -> None:
        """Put every tensor of the part on the device, unless the part is pinned. After an error none has moved."""
        if part in self.pinned:
            return
        try:
            self._memory.put_all([(tensor, device, None) for tensor, _, _ in self._tensors[part]])
        except Exception as error:
            add_note(error, f"{part} was not put on {device}: all of it is where it was")
            raise

    def restore_buffers(self) -> None:
        """Put every buffer that was replaced in its place again."""
        for buffers, kept in self._buffers:
            buffers.update(kept)

    def restore(self) -> None:
        """Put every tensor back on its device, with its own memory: first those to park, which make room."""
        self.restore_buffers()
        for is_parked in (True, False):
            for part in self._tensors:
                self._restore(part, is_parked=is_parked)

    def _restore(self, part: str, *, is_parked: bool) -> None:
        """Put back the tensors of a part that were parked, or the others. An error keeps none of the other parts."""
        try:
            self._memory.put_all([origin for origin in self._tensors[part] if (origin[2] is not None) == is_parked])
        except Exception as error:
            self.failed[part] = error

    def changes(self) -> Iterator[str]:
        """The parts that could not be put back."""
        for part, error in self.failed.items():
            yield f"{part}: {type(error).__name__}: {error}. All of it is where it was in the phase. {REPAIR}"


class Gradients(Snapshot):
    """The gradients that wait for the optimizer. Phases do not touch them; code inside may.

    `Module.to` casts and moves them with their weights, and only the weights would come back as they were: a step in
    the middle of an accumulation would fail, or use rounded ones.
    """

    def __init__(self, modules: Modules):
        self._kept = [
            (parameter, parameter.grad, None if parameter.grad is None else parameter.grad.detach())
            for _, parameter in parameters(modules)
            if parameter.requires_grad
        ]

    def restore(self) -> None:
        """Give every trained parameter its gradient again, in its own memory."""
        for parameter, gradient, values in self._kept:
            if gradient is not None and values is not None and not _is_same_memory(gradient, values):
                gradient.data = values
            if parameter.grad is not gradient:
                parameter.grad = gradient


class EmaWeights(Snapshot):
    """The weights of an EMA with `store`, `copy_to` and `restore`, as diffusers' EMAModel has them.

    A phase that does not swap them in swaps them out at its end if other code left them in. An EMA that does not fit
    is a PhaseError where it is `needed`; elsewhere it is left alone.
    """

    def __init__(self, ema: Any, parameters: Sequence[torch.nn.Parameter], *, needed: bool):
        self._ema = ema
        self._was_in = is_swapped_in(ema)
        self._parameters: list[torch.nn.Parameter] = []
        reason = ema_mismatch(ema, parameters)
        if self._was_in:
            return
        if reason is None:
            is_whole = len(ema.shadow_params) == len(parameters)
            self._parameters = [parameter for parameter in parameters if is_whole or parameter.requires_grad]
        elif needed:
            raise PhaseError(reason, phase="validate")

    def swap_in(self) -> None:
        """Swap the averages in, unless the phase around this one did."""
        if not self._was_in:
            self._ema.store(self._parameters)
            self._ema.copy_to(self._parameters)

    def restore(self) -> None:
        """Swap the averages out, also where other code swapped them in."""
        if self._parameters and is_swapped_in(self._ema):
            self._ema.restore(self._parameters)

    def changes(self) -> Iterator[str]:
        """Whether the averages are in or out, if that differs."""
        if is_swapped_in(self._ema) != self._was_in:
            yield f"ema: its weights are {'in' if is_swapped_in(self._ema) else 'no longer in'} the model"


class ScheduleFreeMode(Snapshot):
    """The mode of a schedule-free optimizer: in `eval` the parameters hold the averaged weights.

    Its own `train()` after `eval()` interpolates back, which rounds. So the parameters are copied back too.
    """

    def __init__(self, optimizer: Any):
        # Of any class: schedulefree's wrapper around other optimizers is no torch.optim.Optimizer.
        self._optimizer = unwrapped(optimizer)
        self._was_training = is_training(self._optimizer)
        self._stored: list[tuple[torch.Tensor, torch.Tensor]] = []

    def swap_in(self) -> None:
        """Put the optimizer into eval mode, unless it is in it already or has no such modes."""
        if self._was_training:
            parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
            self._stored = [(parameter, parameter.detach().to("cpu", copy=True)) for parameter in parameters]
            self._optimizer.eval()

    def restore(self) -> None:
        """Put the optimizer back into its mode, and the parameters to their trained values."""
        if self._was_training and not is_training(self._optimizer):
            self._optimizer.train()
        with torch.no_grad():
            for parameter, values in self._stored:
                parameter.data.copy_(values)

    def changes(self) -> Iterator[str]:
        """The mode, if it differs."""
        if is_training(self._optimizer) != self._was_training:
            yield f"optimizer: is in {'train' if not self._was_training else 'eval'} mode"


def ema_mismatch(ema: Any, parameters: Sequence[torch.nn.Parameter]) -> str | None:
    """Why the EMA's weights cannot be put into these parameters, or None."""
    missing = [name for name in ("store", "copy_to", "restore") if not callable(getattr(ema, name, None))]
    missing += [] if hasattr(ema, "shadow_params") else ["shadow_params"]
    if missing:
        return (
            f"the ema is a {type(ema).__name__} without {', '.join(missing)}; use one such as diffusers' EMAModel, or "
            "swap its weights in yourself and leave out ema"
        )
    num_trained = sum(parameter.requires_grad for parameter in parameters)
    num_averaged = len(ema.shadow_params)
    if num_averaged in (len(parameters), num_trained):
        return None
    return (
        f"the ema averages {num_averaged} parameters, but the denoiser has {len(parameters)}, {num_trained} of them "
        "trained; build it over one of these"
    )


def is_training(optimizer: Any) -> bool:
    """Whether a schedule-free optimizer is in train mode; False for optimizers that have no such mode."""
    # schedulefree's optimizers keep the mode in each group, its wrapper around other optimizers in itself.
    modes = (getattr(optimizer, "train_mode", False), *(group.get("train_mode") for group in optimizer.param_groups))
    return any(modes) and callable(getattr(optimizer, "train", None))


def named_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer of a module by dotted name, each object once."""
    return chain(module.named_parameters(), module.named_buffers())


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = ((t.device, t.dtype, t.data_ptr(), t.shape, t.stride()) for t in (one, other))
    return first == second
