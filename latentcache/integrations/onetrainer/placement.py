"""The parts of a trainer's model, put back where they were: what OneTrainer's caching leaves to its callers.

Before it encodes, OneTrainer moves all parts away but the encoder that it needs, and puts everything into eval mode.
Nothing moves them back, so that a validation whose cache is cold fails (OneTrainer #459).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch

from latentcache.errors import PipelineError

_CPU = torch.device("cpu")


class _Refreshing(Protocol):
    """Something with functions that are called before and after its encoding."""

    before_cache_fun: Callable[[], None]
    after_cache_fun: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Part:
    """One part as it was: the device of each tensor, and the training flag of each submodule."""

    name: str
    module: torch.nn.Module
    homes: tuple[tuple[torch.Tensor, torch.device], ...]
    modes: tuple[tuple[torch.nn.Module, bool], ...]

    @classmethod
    def of(cls, name: str, module: torch.nn.Module) -> _Part:
        homes = tuple((tensor, tensor.device) for tensor in _tensors(module))
        return cls(name, module, homes, tuple((child, child.training) for child in module.modules()))

    @property
    def home(self) -> torch.device | None:
        """The device of all its tensors; None if they lay on several, or there are none."""
        devices = {device for _, device in self.homes}
        return devices.pop() if len(devices) == 1 else None

    def is_away(self) -> bool:
        return any(tensor.device != device for tensor, device in self.homes)


class Restoring:
    """Records where the parts of a model are and in which mode (`before`), and puts them back (`after`).

    `model` is the model, or a function that gives it when it is needed. Its parts are its attributes that are modules.
    They are moved by the model's own functions, so that what it moves along with them (LoRA weights, offloaded layers)
    comes back too: `<part>_to(device)`, or `materialize(part)` and `evict(part)`. What these do not bring back is moved
    directly.
    """

    def __init__(self, model: Any):
        self._model = model
        self._parts: tuple[_Part, ...] = ()

    def before(self) -> None:
        """Record the placement. PipelineError if there is no model yet."""
        model = self._found()
        self._parts = tuple(_Part.of(name, part) for name, part in vars(model).items() if _is_part(part))
        if not self._parts:
            raise PipelineError(
                f"{type(model).__name__} has no parts: none of its attributes is a torch.nn.Module. Hand over the "
                "model that the trainer loads, or a function that gives it."
            )

    def after(self) -> None:
        """Put back what `before` recorded. Without a record it does nothing."""
        parts, self._parts = self._parts, ()
        model = self._found() if parts else None
        # Away first, so that there is room for what comes in.
        for part in sorted(parts, key=lambda part: (part.home != _away(model), part.name.endswith("_lora"))):
            if part.is_away() and part.home is not None:
                _ask_model(model, part.name, part.home)
                if part.is_away():
                    part.module.to(part.home)
            for tensor, device in part.homes:
                if tensor.device != device:
                    tensor.data = tensor.data.to(device)
            for module, training in part.modes:
                module.training = training

    def around(self, module: _Refreshing) -> None:
        """Have it done around each refresh of this cache module: recorded first, put back last."""
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

    def _found(self) -> Any:
        model = self._model() if _gives_model(self._model) else self._model
        if model is None:
            raise PipelineError("the function that gives the model gives None: it is not loaded yet")
        return model


def restoring(model: Any) -> Restoring:
    """`Restoring` for this model, or for the model that this function gives.

    Use its `before` and `after` around whatever moves parts: `before_cache_fun` and `after_cache_fun` of a cache module
    (`around` joins them to functions that are there), or anything else that fills a cache.
    """
    return Restoring(model)


def _gives_model(value: Any) -> bool:
    """Whether it is a function. A model is an object with parts, callable or not."""
    return callable(value) and not any(_is_part(part) for part in getattr(value, "__dict__", {}).values())


def _is_part(value: Any) -> bool:
    return isinstance(value, torch.nn.Module)


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    return chain(module.parameters(), module.buffers())


def _away(model: Any) -> torch.device:
    """Where the model keeps parts that are not needed."""
    return torch.device(getattr(model, "temp_device", None) or _CPU)


def _ask_model(model: Any, name: str, device: torch.device) -> None:
    """Have the model move a part, by whichever functions it has; by none it stays."""
    if name.endswith("_lora"):
        return  # these come with the part that they belong to, and have no name of their own in OneTrainer
    move = getattr(model, f"{name}_to", None)
    if callable(move):
        move(device)
        return
    give_or_take = getattr(model, "evict" if device == _away(model) else "materialize", None)
    if callable(give_or_take):
        give_or_take(name)
