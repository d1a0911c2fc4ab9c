"""Changes that a validation may make to a training run by mistake, and the state that a phase has to restore.

`state_of` shares no code with the phases that restore the run.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from helpers.phase_training import Training


def compute_modes(device: torch.device) -> list[Any]:
    """Gradient mode, and the state and dtype of autocast on the CPU and on the device."""
    kinds = dict.fromkeys(("cpu", device.type))
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return [torch.is_grad_enabled(), *autocast]


def set_compute_modes(modes: list[Any]) -> None:
    torch.set_grad_enabled(modes[0])
    for kind, is_enabled, dtype in modes[1:]:
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)


def all_devices(training: Training) -> list[torch.device]:
    """All devices of the training's type: each has a random stream."""
    num = torch.get_device_module(training.device).device_count()
    return [torch.device(training.device.type, index) for index in range(num)]


def disturb(training: Training) -> None:
    """Change everything that a phase restores."""
    random.random()
    np.random.rand()
    torch.rand(3)
    for device in all_devices(training):
        torch.rand(3, device=device)
    vae, text_encoder = training.parts["vae"], training.parts["text_encoder"]
    training.unet.eval().requires_grad_(False)
    training.unet.mid_block.train()
    vae.train().requires_grad_(True)
    torch.nn.Module.to(training.unet, "cpu")
    torch.nn.Module.to(text_encoder, training.device)
    torch.nn.Module.to(training.unet, dtype=torch.bfloat16)  # loses bits, as the next line does
    torch.nn.Module.to(vae, dtype=torch.float16)
    training.optimizer.zero_grad(set_to_none=True)
    # Like code that forgets to swap them out.
    if training.ema is not None and training.ema.temp_stored_params is None:
        parameters = list(training.unet.parameters())
        training.ema.store(parameters)
        training.ema.copy_to(parameters)
    if training.variant == "schedule-free":
        training.optimizer.eval()
    _, *autocast = compute_modes(training.device)
    set_compute_modes([True, *((kind, not is_enabled, torch.float16) for kind, is_enabled, _ in autocast)])


def state_of(training: Training) -> dict[str, Any]:
    """Everything that affects the training, by name."""
    state: dict[str, Any] = {}
    for part, module in training.modules().items():
        for name, submodule in module.named_modules():
            state.update(_of_submodule(f"{part}.{name}", submodule))
    state["python"], state["torch"] = random.getstate(), _digest(torch.get_rng_state())
    numpy_state = np.random.get_state(legacy=False)
    state["numpy"] = (numpy_state["state"]["key"].tobytes(), numpy_state["state"]["pos"])
    if training.device.type != "cpu":
        get_state = torch.get_device_module(training.device).get_rng_state
        state["device streams"] = [_digest(get_state(device)) for device in all_devices(training)]
    state["compute modes"] = compute_modes(training.device)
    state["optimizer"] = [
        (name, _digest(value) if isinstance(value, torch.Tensor) else value)
        for entry in training.optimizer.state.values()
        for name, value in entry.items()
    ]
    state["groups"] = [
        {**group, "params": [id(p) for p in group["params"]]} for group in training.optimizer.param_groups
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
            gradient = tensor.grad if tensor.is_leaf else None
            grown = None if gradient is None else (id(gradient), str(gradient.device), _digest(gradient))
            place = (id(tensor), str(tensor.device), tensor.dtype)
            yield f"{name}.{key}", (*place, tensor.requires_grad, _digest(tensor), grown)


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of everything that changed."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]
