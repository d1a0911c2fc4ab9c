"""Moving the parts of a trainer's model back after caching, which OneTrainer leaves to its callers.

Before it encodes, OneTrainer moves all parts away but the encoder that it needs, and sets all to eval mode. It does not
move them back, so that a validation whose cache is cold fails (OneTrainer #459).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch

from latentcache.errors import PipelineError

_CPU = torch.device("cpu")


class _Refreshing(Protocol):
    """A cache module: it calls these functions before and after encoding."""

    before_cache_fun: Callable[[], None]
    after_cache_fun: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _PartRecord:
    """Where one part was: the device of each tensor by its name, and the training flag of each submodule.

    Tensors without values (on `meta`) are left out: if they are loaded meanwhile, they stay where they are.
    """

    name: str
    module: torch.nn.Module
    devices: Mapping[str, torch.device]
    modes: tuple[tuple[torch.nn.Module, bool], ...]

    @classmethod
    def of(cls, name: str, module: torch.nn.Module) -> _PartRecord:
        devices = {path: tensor.device for path, tensor in _tensors(module) if tensor.device.type != "meta"}
        return cls(name, module, devices, tuple((child, child.training) for child in module.modules()))

    def device(self, away: torch.device) -> torch.device | None:
        """The device of the part: of several the first that is not `away`. None if it has no tensors."""
        return next((device for device in self.devices.values() if device != away), away if self.devices else None)

    def moved(self) -> list[tuple[str, torch.Tensor, torch.device]]:
        """The tensors that are on another device now, with the recorded one. Moving may have replaced a tensor."""
        return [
            (name, tensor, device)
            for name, tensor in _tensors(self.module)
            if (device := self.devices.get(name, tensor.device)) != tensor.device
        ]

    def move_back(self) -> None:
        """Move the tensors back, one by one. PipelineError, after all others, for tensors without values now."""
        lost = []
        for name, tensor, device in self.moved():
            if tensor.device.type == "meta":
                lost.append(name)
            else:
                tensor.data = tensor.data.to(device)
        if lost:
            raise PipelineError(
                f"{self.name}.{lost[0]} had values before the cache was filled and has none now (it is on meta), as do "
                f"{len(lost)} of its tensors: they cannot be moved back. Load the model again."
            )


class PlacementGuard:
    """Records the devices and train modes of a model's parts (`before`), and restores them (`after`).

    `model` is the model, or a function that gives it when it is needed. Its parts are its attributes that are modules.
    The model's own functions move them, so that what belongs to a part (LoRA weights, offloaded layers) is moved too:
    `<part>_to(device)`, or `materialize(part)` and `evict(part)`. What these do not move back is moved directly, but
    not for a part with a `<part>_offload_conductor`, which alone decides where its layers are.
    """

    def __init__(self, model: Any):
        self._model = model
        self._parts: tuple[_PartRecord, ...] = ()

    def before(self) -> None:
        """Record the placement. PipelineError if there is no model yet."""
        model = self._current_model()
        self._parts = tuple(_PartRecord.of(name, part) for name, part in vars(model).items() if _is_part(part))
        if not self._parts:
            raise PipelineError(
                f"{type(model).__name__} has no parts: none of its attributes is a torch.nn.Module. Pass the model "
                "that the trainer loads, or a function that gives it."
            )

    def after(self) -> None:
        """Restore what `before` recorded. Without a record it does nothing.

        All parts are restored, also after an error. Raises PipelineError for weights that have no values any more.
        """
        parts, self._parts = self._parts, ()
        if not parts:
            return
        model = self._current_model()
        away = _away(model)
        with (
            ExitStack() as steps
        ):  # in reverse: parts that leave the device first, so that there is room for the others
            for part in sorted(parts, key=lambda part: (part.device(away) != away, part.name.endswith("_lora")))[::-1]:
                steps.callback(_put_back, model, part, away)

    def around(self, module: _Refreshing) -> None:
        """Do so at each refresh of this cache module: record first, restore last."""
        before, after = module.before_cache_fun, module.after_cache_fun

        def record_and_prepare() -> None:
            self.before()
            before()

        def finish_and_restore() -> None:
            try:
                after()
            finally:
                self.after()

        module.before_cache_fun, module.after_cache_fun = record_and_prepare, finish_and_restore

    def _current_model(self) -> Any:
        model = self._model() if _gives_model(self._model) else self._model
        if model is None:
            raise PipelineError("the function that gives the model gives None: it is not loaded yet")
        return model


def restoring(model: Any) -> PlacementGuard:
    """A `PlacementGuard` for this model, or for the model that this function gives.

    Its `around` adds it to a cache module; for other code that moves parts call `before` and `after` yourself.
    """
    return PlacementGuard(model)


def _gives_model(value: Any) -> bool:
    """Whether it is a function. A model is an object with parts, callable or not."""
    return callable(value) and not any(_is_part(part) for part in getattr(value, "__dict__", {}).values())


def _is_part(value: Any) -> bool:
    return isinstance(value, torch.nn.Module)


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _put_back(model: Any, part: _PartRecord, away: torch.device) -> None:
    for module, training in part.modes:
        module.training = training
    device = part.device(away)
    if device is None or not part.moved():
        return
    by_model = _move_by_model(model, part.name, device, away)
    if by_model and getattr(model, f"{part.name}_offload_conductor", None) is not None:
        return
    part.move_back()


def _away(model: Any) -> torch.device:
    """The device of the parts that the model does not need."""
    return torch.device(getattr(model, "temp_device", None) or _CPU)


def _move_by_model(model: Any, name: str, device: torch.device, away: torch.device) -> bool:
    """Move a part by the model's own functions. False, and nothing is moved, if it has none."""
    if name.endswith("_lora"):
        return False  # OneTrainer moves it together with its part, and has no function for it alone
    move = getattr(model, f"{name}_to", None)
    if callable(move):
        move(device)
        return True
    evict_or_materialize = getattr(model, "evict" if device == away else "materialize", None)
    if callable(evict_or_materialize):
        evict_or_materialize(name)
        return True
    return False
