"""What a validation may do to a training run by mistake and a phase puts back, and what must be as before afterwards.

`state_of` looks at the run with code of its own: it shares nothing with what puts the run back.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from helpers.phase_training import Training

FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Any]] = {
    "grad": (torch.is_grad_enabled, torch.set_grad_enabled, True),
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda value: torch.set_autocast_enabled("cpu", value),
        True,
    ),
    "autocast dtype": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda value: torch.set_autocast_dtype("cpu", value),
        torch.float16,
    ),
}
"""How each is read and set, and a value that is not its default."""


def modes(training: Training) -> None:
    training.unet.eval()
    training.parts["vae"].train()
    training.unet.mid_block.train()


def requires_grad(training: Training) -> None:
    training.unet.requires_grad_(False)
    training.parts["vae"].requires_grad_(True)


def placement(training: Training) -> None:
    torch.nn.Module.to(training.unet, "cpu")
    torch.nn.Module.to(training.parts["text_encoder"], training.device)


def dtypes(training: Training) -> None:
    """Both lose bits."""
    torch.nn.Module.to(training.unet, dtype=torch.bfloat16)
    torch.nn.Module.to(training.parts["vae"], dtype=torch.float16)


def gradients(training: Training) -> None:
    training.optimizer.zero_grad(set_to_none=True)


def random_python(training: Training) -> None:
    random.random()


def random_numpy(training: Training) -> None:
    np.random.rand()


def random_torch(training: Training) -> None:
    torch.rand(3)


def random_device(training: Training) -> None:
    torch.rand(3, device=training.device)


def flags(training: Training) -> None:
    for _, put, value in FLAGS.values():
        put(value)


def averages(training: Training) -> None:
    """As someone does who forgets to swap them out."""
    if training.ema is not None and training.ema.temp_stored_params is None:
        parameters = list(training.unet.parameters())
        training.ema.store(parameters)
        training.ema.copy_to(parameters)
    if training.variant == "schedule-free":
        training.optimizer.eval()


DISTURBANCES = (
    random_python,
    random_numpy,
    random_torch,
    random_device,
    modes,
    requires_grad,
    placement,
    dtypes,
    gradients,
    averages,
    flags,
)


def state_of(training: Training) -> dict[str, Any]:
    """All that training rests on, by name."""
    state: dict[str, Any] = {}
    for part, module in training.modules().items():
        for name, submodule in module.named_modules():
            state.update(_of_submodule(f"{part}.{name}", submodule))
    state["python"], state["torch"] = random.getstate(), _digest(torch.get_rng_state())
    numpy_state = np.random.get_state(legacy=False)
    state["numpy"] = (numpy_state["state"]["key"].tobytes(), numpy_state["state"]["pos"])
    if training.device.type != "cpu":
        state["device stream"] = _digest(torch.get_device_module(training.device).get_rng_state(training.device))
    state |= {f"flag {name}": read() for name, (read, _, _) in FLAGS.items()}
    state["optimizer"] = [
        (name, _digest(value) if isinstance(value, torch.Tensor) else value)
        for entry in training.optimizer.state.values()
        for name, value in entry.items()
    ]
    state["groups"] = [
        {key: value for key, value in group.items() if key != "params"} | {"params": [id(p) for p in group["params"]]}
        for group in training.optimizer.param_groups
    ]
    state["scaler"] = training.scaler.state_dict()
    state["scheduler"] = (dict(training.scheduler.config), _digest(training.scheduler.timesteps))
    if training.ema is not None:
        state["ema"] = (training.ema.temp_stored_params is None, [_digest(t) for t in training.ema.shadow_params])
    return copy.deepcopy(state)


def _of_submodule(name: str, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    yield f"{name} training", module.training
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield f"{name}.{key}", _of_tensor(tensor)


def _of_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    gradient = tensor.grad if tensor.is_leaf else None
    grown = None if gradient is None else (id(gradient), str(gradient.device), _digest(gradient))
    return id(tensor), str(tensor.device), tensor.dtype, tensor.requires_grad, _digest(tensor), grown


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of what is not as it was."""
    names = (*before, *(name for name in after if name not in before))
    missing = object()
    return [name for name in names if before.get(name, missing) != after.get(name, missing)]
