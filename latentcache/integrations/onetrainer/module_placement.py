"""The parts of a trainer's model, put back where they were: what OneTrainer's caching leaves to its callers.

Before it encodes, OneTrainer moves all parts away but the encoder that it needs, and puts everything into eval mode.
Nothing moves them back, so that a validation whose cache is cold fails (OneTrainer #459).
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
    """Something with functions that are called before and after its encoding."""

    before_cache_fun: Callable[[], None]
    after_cache_fun: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Part:
    """One part as it was: the device of each tensor by its name, and the training flag of each submodule.

    Tensors that held no values (on `meta`) are not among them: if they have been loaded since, that stays.
    """

    name: str
    module: torch.nn.Module
    homes: Mapping[str, torch.device]
    modes: tuple[tuple[torch.nn.Module, bool], ...]

    @classmethod
    def of(cls, name: str, module: torch.nn.Module) -> _Part:
        homes = {place: tensor.device for place, tensor in _tensors(module) if tensor.device.type != "meta"}
        return cls(name, module, homes, tuple((child, child.training) for child in module.modules()))

    def home(self, away: torch.device) -> torch.device | None:
        """The device of its tensors, if they lay on several the first that is not `away`; None if there are none."""
        return next((device for device in self.homes.values() if device != away), away if self.homes else None)

    def strayed(self) -> list[tuple[str, torch.Tensor, torch.device]]:
        """The tensors that are not where they were, with where they were. Some moves put others in their place."""
        return [
            (name, tensor, home)
            for name, tensor in _tensors(self.module)
            if (home := self.homes.get(name, tensor.device)) != tensor.device
        ]

    def move_back(self) -> None:
        """Move what has strayed, one by one. PipelineError, when all else is back, for what holds no values now."""
        lost = []
        for name, tensor, home in self.strayed():
            if tensor.device.type == "meta":
                lost.append(name)
            else:
                tensor.data = tensor.data.to(home)
        if lost:
            raise PipelineError(
                f"{self.name}.{lost[0]} held values before the cache was filled and holds none now (it is on meta), as "
                f"do {len(lost)} of its tensors: they cannot be moved back. Load the model again."
            )


class Restoring:
    """Records where the parts of a model are and in which mode (`before`), and puts them back (`after`).

    `model` is the model, or a function that gives it when it is needed. Its parts are its attributes that are modules.
    They are moved by the model's own functions, so that what it moves along with them (LoRA weights, offloaded layers)
    comes back too: `<part>_to(device)`, or `materialize(part)` and `evict(part)`. What these do not bring back is moved
    directly; but not of a part with a `<part>_offload_conductor`, which alone decides which of its layers lie where.
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
        """Put back what `before` recorded. Without a record it does nothing.

        What cannot be put back does not keep the rest from it. PipelineError for weights that hold no values any more.
        """
        parts, self._parts = self._parts, ()
        if not parts:
            return
        model = self._found()
        away = _away(model)
        with ExitStack() as steps:  # in reverse: away first, so that there is room for what comes in
            for part in sorted(parts, key=lambda part: (part.home(away) != away, part.name.endswith("_lora")))[::-1]:
                steps.callback(_put_back, model, part, away)

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


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _put_back(model: Any, part: _Part, away: torch.device) -> None:
    for module, training in part.modes:
        module.training = training
    home = part.home(away)
    if home is None or not part.strayed():
        return
    moved = _ask_model(model, part.name, home, away)
    if moved and getattr(model, f"{part.name}_offload_conductor", None) is not None:
        return
    part.move_back()


def _away(model: Any) -> torch.device:
    """Where the model keeps parts that are not needed."""
    return torch.device(getattr(model, "temp_device", None) or _CPU)


def _ask_model(model: Any, name: str, device: torch.device, away: torch.device) -> bool:
    """Have the model move a part, by whichever functions it has. Whether it had one; without it stays."""
    if name.endswith("_lora"):
        return False  # these come with the part that they belong to, and have no name of their own in OneTrainer
    move = getattr(model, f"{name}_to", None)
    if callable(move):
        move(device)
        return True
    give_or_take = getattr(model, "evict" if device == away else "materialize", None)
    if callable(give_or_take):
        give_or_take(name)
        return True
    return False
