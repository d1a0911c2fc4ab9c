"""Moves the parts of OneTrainer's model back after caching.

Before encoding, OneTrainer moves all parts but the required encoder away, and sets all to eval mode. It does not move
them back, so a validation on a cold cache fails (OneTrainer #459).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from latentcache.devices.tensor_location import named_weights
from latentcache.errors import PipelineError
from latentcache.phases.state import TrainingModes


class PlacementGuard:
    """Records the devices and train modes of a model's parts (`before`) and restores them (`after`).

    `around(cache)` does both at each refresh of a cache module.

    `model` is the model, or a function that returns it. Its parts are its attributes that are modules. They are moved
    by the model's own functions, which also move what belongs to a part (LoRA weights, offloaded layers):
    `<part>_to(device)`, or `materialize(part)` and `evict(part)`. Tensors that are still elsewhere are then moved
    directly, except for a part with a `<part>_offload_conductor`, which alone decides where its layers are.
    """

    def __init__(self, model: Any):
        self._model = model
        self._places: dict[str, tuple[torch.nn.Module, dict[str, torch.device]]] = {}
        """Each part, and the device of each of its tensors. Tensors without values (on `meta`) are left out: they stay
        wherever they are loaded meanwhile."""
        self._modes = TrainingModes({})

    def before(self) -> None:
        """Record the placement. Raises PipelineError if there is no model yet."""
        model = self._current_model()
        parts = {name: part for name, part in vars(model).items() if isinstance(part, torch.nn.Module)}
        if not parts:
            raise PipelineError(
                f"{type(model).__name__} has no parts: none of its attributes is a torch.nn.Module. Pass the model "
                "that the trainer loads, or a function that returns it."
            )
        self._places = {
            name: (part, {path: tensor.device for path, tensor in named_weights(part) if tensor.device.type != "meta"})
            for name, part in parts.items()
        }
        self._modes = TrainingModes(parts)

    def after(self) -> None:
        """Restore what `before` recorded; a no-op without a record.

        Raises PipelineError, after restoring everything else, for weights that have lost their values.
        """
        places, self._places = self._places, {}
        self._modes.restore()
        self._modes = TrainingModes({})
        if not places:
            return
        model = self._current_model()
        # Parts that belong on the device for unused parts leave first, to make room for the others.
        away = torch.device(getattr(model, "temp_device", None) or "cpu")
        order = sorted(places, key=lambda name: (_home(places[name][1], away) != away, name.endswith("_lora")))
        with ExitStack() as steps:  # it calls them in reverse
            for name in reversed(order):
                steps.callback(_restore, model, name, *places[name], away)

    def around(self, module: Any) -> None:
        """Record before and restore after each refresh of this CacheModule."""
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
            raise PipelineError("the function for the model returned None: no model is loaded yet")
        return model


def _home(devices: Mapping[str, torch.device], away: torch.device) -> torch.device | None:
    """The device of a part: the first that is not `away`, if any. None if the part has no tensors."""
    return next((device for device in devices.values() if device != away), away if devices else None)


def _restore(
    model: Any, name: str, part: torch.nn.Module, devices: Mapping[str, torch.device], away: torch.device
) -> None:
    """Move a part back with the model's functions, then any remaining tensors one by one.

    Raises PipelineError at the end for tensors that have lost their values.
    """
    device = _home(devices, away)

    def moved() -> list[tuple[str, torch.Tensor, torch.device]]:
        """The tensors that are not on their recorded device. Moving may have replaced tensors."""
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
        if tensor.grad is not None:  # from an unfinished step
            tensor.grad.data = tensor.grad.data.to(before)
    if lost:
        raise PipelineError(
            f"{name}.{lost[0]} had values before the cache was filled and has none now (it is on meta): "
            f"{len(lost)} tensors of {name} cannot be moved back. Load the model again."
        )


def _move_by_model(model: Any, name: str, device: torch.device, away: torch.device) -> bool:
    """Move a part with the model's own functions. False, and nothing is moved, if it has none."""
    if name.endswith("_lora"):
        return False  # OneTrainer moves it together with its part
    move = getattr(model, f"{name}_to", None)
    if callable(move):
        move(device)
        return True
    evict_or_materialize = getattr(model, "evict" if device == away else "materialize", None)
    if callable(evict_or_materialize):
        evict_or_materialize(name)
        return True
    return False
