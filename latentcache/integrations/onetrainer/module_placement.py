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

    def restore(self, model: Any, away: torch.device) -> None:
        """Restore the flags, and move the part by the model's functions, then what is left tensor by tensor.

        Raises PipelineError, when all others are back, for tensors without values now.
        """
        for module, training in self.modes:
            module.training = training
        device = self.device(away)
        if device is None or not self._moved():
            return
        by_model = _move_by_model(model, self.name, device, away)
        if by_model and getattr(model, f"{self.name}_offload_conductor", None) is not None:
            return
        lost = []
        for name, tensor, before in self._moved():
            if tensor.device.type == "meta":
                lost.append(name)
            else:
                tensor.data = tensor.data.to(before)
                if tensor.grad is not None:  # gradients of a step that is not over
                    tensor.grad.data = tensor.grad.data.to(before)
        if lost:
            raise PipelineError(
                f"{self.name}.{lost[0]} had values before the cache was filled and has none now (it is on meta), as do "
                f"{len(lost)} of its tensors: they cannot be moved back. Load the model again."
            )

    def _moved(self) -> list[tuple[str, torch.Tensor, torch.device]]:
        """The tensors that are on another device now, with the recorded one. Moving may have replaced a tensor."""
        here = [(name, tensor, self.devices.get(name, tensor.device)) for name, tensor in _tensors(self.module)]
        return [(name, tensor, before) for name, tensor, before in here if before != tensor.device]


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
        # The device of the parts that the model does not need. They leave first, so that there is room for the others.
        away = torch.device(getattr(model, "temp_device", None) or "cpu")
        with ExitStack() as steps:  # it calls the last first
            for part in sorted(parts, key=lambda part: (part.device(away) != away, part.name.endswith("_lora")))[::-1]:
                steps.callback(part.restore, model, away)

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
        # A model is an object with parts, callable or not.
        has_parts = any(map(_is_part, getattr(self._model, "__dict__", {}).values()))
        model = self._model() if callable(self._model) and not has_parts else self._model
        if model is None:
            raise PipelineError("the function that gives the model gives None: it is not loaded yet")
        return model


restoring = PlacementGuard
"""`restoring(model).around(cache)`; for other code that moves parts call `before` and `after` yourself."""


def _is_part(value: Any) -> bool:
    return isinstance(value, torch.nn.Module)


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


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
