"""Moving the parts of a trainer's model back after caching, which OneTrainer leaves to its callers.

Before it encodes, OneTrainer moves all parts away but the encoder that it needs, and sets all to eval mode. It does not
move them back, so that a validation whose cache is cold fails (OneTrainer #459).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from latentcache.errors import PipelineError
from latentcache.phases.state import TrainingModes
from latentcache.phases.weights import named_weights


class PlacementGuard:
    """Records the devices and train modes of a model's parts (`before`), and restores them (`after`).

    `around(cache)` does so at each refresh of a cache module.

    `model` is the model, or a function that gives it when it is needed. Its parts are its attributes that are modules.
    The model's own functions move them, so that what belongs to a part (LoRA weights, offloaded layers) is moved too:
    `<part>_to(device)`, or `materialize(part)` and `evict(part)`. What these do not move back is moved directly, but
    not for a part with a `<part>_offload_conductor`, which alone decides where its layers are.
    """

    def __init__(self, model: Any):
        self._model = model
        self._places: dict[str, tuple[torch.nn.Module, dict[str, torch.device]]] = {}
        """Each part, and the device of each of its tensors. Those without values (on `meta`) are left out: if they are
        loaded meanwhile, they stay where they are."""
        self._modes = TrainingModes({})

    def before(self) -> None:
        """Record the placement. PipelineError if there is no model yet."""
        model = self._current_model()
        parts = {name: part for name, part in vars(model).items() if isinstance(part, torch.nn.Module)}
        if not parts:
            raise PipelineError(
                f"{type(model).__name__} has no parts: none of its attributes is a torch.nn.Module. Pass the model "
                "that the trainer loads, or a function that gives it."
            )
        self._places = {
            name: (part, {path: tensor.device for path, tensor in named_weights(part) if tensor.device.type != "meta"})
            for name, part in parts.items()
        }
        self._modes = TrainingModes(parts)

    def after(self) -> None:
        """Restore what `before` recorded. Without a record it does nothing.

        All parts are restored, also after an error. Raises PipelineError for weights that have no values any more.
        """
        places, self._places = self._places, {}
        self._modes.restore()
        self._modes = TrainingModes({})
        if not places:
            return
        model = self._current_model()
        # The device of the parts that the model does not need. They leave first, so that there is room for the others.
        away = torch.device(getattr(model, "temp_device", None) or "cpu")
        order = sorted(places, key=lambda name: (_home(places[name][1], away) != away, name.endswith("_lora")))
        with ExitStack() as steps:  # it calls the last first
            for name in reversed(order):
                steps.callback(_restore, model, name, *places[name], away)

    def around(self, module: Any) -> None:
        """Do so at each refresh of this CacheModule: record first, restore last."""
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
        is_function = callable(self._model) and not isinstance(self._model, torch.nn.Module)
        model = self._model() if is_function else self._model
        if model is None:
            raise PipelineError("the function that gives the model gives None: it is not loaded yet")
        return model


def _home(devices: Mapping[str, torch.device], away: torch.device) -> torch.device | None:
    """The device of a part: of several the first that is not `away`. None if it has no tensors."""
    return next((device for device in devices.values() if device != away), away if devices else None)


def _restore(
    model: Any, name: str, part: torch.nn.Module, devices: Mapping[str, torch.device], away: torch.device
) -> None:
    """Move a part by the model's functions, then what is left tensor by tensor.

    Raises PipelineError, when all others are back, for tensors without values now.
    """
    device = _home(devices, away)

    def moved() -> list[tuple[str, torch.Tensor, torch.device]]:
        """The tensors that are on another device now, with the recorded one. Moving may have replaced a tensor."""
        here = [(path, tensor, devices.get(path, tensor.device)) for path, tensor in named_weights(part)]
        return [(path, tensor, before) for path, tensor, before in here if before != tensor.device]

    if device is None or not moved():
        return
    if _move_by_model(model, name, device, away) and getattr(model, f"{name}_offload_conductor", None) is not None:
        return
    lost = []
    for path, tensor, before in moved():
        if tensor.device.type == "meta":
            lost.append(path)
            continue
        tensor.data = tensor.data.to(before)
        if tensor.grad is not None:  # gradients of a step that is not over
            tensor.grad.data = tensor.grad.data.to(before)
    if lost:
        raise PipelineError(
            f"{name}.{lost[0]} had values before the cache was filled and has none now (it is on meta), as do "
            f"{len(lost)} of its tensors: they cannot be moved back. Load the model again."
        )


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
