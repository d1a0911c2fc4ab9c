"""Everything that a validation may do to a training run by mistake, and everything that must be as before afterwards.

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
from accelerate import cpu_offload_with_hook
from diffusers.models.attention_processor import AttnProcessor
from helpers.phase_training import Training

FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Any]] = {
    "grad": (torch.is_grad_enabled, torch.set_grad_enabled, True),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False),
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
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        lambda value: torch.use_deterministic_algorithms(value, warn_only=True),
        True,
    ),
    "benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
        True,
    ),
    "cudnn deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda value: setattr(torch.backends.cudnn, "deterministic", value),
        True,
    ),
    "cudnn enabled": (
        lambda: torch.backends.cudnn.enabled,
        lambda value: setattr(torch.backends.cudnn, "enabled", value),
        False,
    ),
    "cudnn tf32": (
        lambda: torch.backends.cudnn.allow_tf32,
        lambda value: setattr(torch.backends.cudnn, "allow_tf32", value),
        False,
    ),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "fp16 reduction": (
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        lambda value: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", value),
        False,
    ),
    "flash": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
}
"""How each is read and set, and a value that is not its default."""


class Stranger(torch.nn.Module):
    """A module that was not there."""

    def forward(self, sample: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return sample


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


def a_cast_around_a_phase(training: Training) -> None:
    """The inner phase finds half precision, and leaves it so; the outer one found float32."""
    vae = torch.nn.Module.to(training.parts["vae"], dtype=torch.float16)
    with training.phases.enter("sample"):
        pass
    assert {parameter.dtype for parameter in vae.parameters()} == {torch.float16}


def buffers(training: Training) -> None:
    embeddings = training.parts["text_encoder"].embeddings
    embeddings.position_ids = embeddings.position_ids.clone() + 1


def structure(training: Training) -> None:
    training.unet.conv_in = Stranger()
    training.parts["vae"].decoder.extra = Stranger()
    del training.parts["text_encoder_2"].text_projection


def torch_hooks(training: Training) -> None:
    training.unet.register_forward_hook(lambda module, args, output: None)
    training.parts["vae"].decoder.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)


def offload_hooks(training: Training) -> None:
    cpu_offload_with_hook(training.parts["vae"], training.device)
    training.unet.forward = Stranger().forward


def settings(training: Training) -> None:
    training.unet.enable_gradient_checkpointing()
    training.unet.set_attn_processor(AttnProcessor())
    training.parts["vae"].enable_tiling()
    training.parts["vae"].encoder.newly_set = 3
    training.parts["text_encoder"].kept_list.append(4)
    training.parts["text_encoder"].kept_dict["b"][0] = 5
    training.parts["text_encoder"].kept_dict["c"] = 6
    training.parts["text_encoder"].kept_tuple[0].append(6)


def adapters(training: Training) -> None:
    if training.variant == "lora":
        training.unet.disable_adapters()
        for module in training.unet.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", 0.1)


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
    a_cast_around_a_phase,
    dtypes,
    gradients,
    buffers,
    torch_hooks,
    offload_hooks,
    settings,
    adapters,
    averages,
    structure,
    flags,
)


def prepare(training: Training) -> Training:
    """Give the run what some disturbances need: plain containers on a module, and a buffer that is saved."""
    encoder = training.parts["text_encoder"]
    encoder.kept_list, encoder.kept_dict, encoder.kept_tuple = [1, 2], {"a": 1, "b": [2]}, ([3], "x")
    return training


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
    for key, value in vars(module).items():
        if key in ("_parameters", "_buffers"):
            yield f"{name} {key}", list(value)
        elif isinstance(value, dict) and key.startswith("_"):
            yield f"{name} {key}", [(str(inner), id(member)) for inner, member in value.items()]
        elif isinstance(value, bool | int | float | str | list | tuple | dict) and key != "training":
            yield f"{name} {key}", repr(value)
        elif callable(value):
            yield f"{name} {key}", id(value)
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield f"{name}.{key}", _of_tensor(parameter)
    for key, buffer in module._buffers.items():
        if buffer is not None:
            yield f"{name}.{key}", _of_tensor(buffer)


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
