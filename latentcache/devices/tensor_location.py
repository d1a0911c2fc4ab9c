"""The tensors of a training run's parts: their names, where their values are, and which software moves them.

Offload hooks, quantised weights and shards are recognised by their attributes, without importing their packages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import torch

from latentcache.errors import DeviceError
from latentcache.utils.nested import named_leaves, named_tensors

AuditKind: TypeAlias = Literal[
    "parameter", "buffer", "attribute", "gradient", "optimizer state", "orphan",
    "ema", "batch", "scale", "hook", "meta", "mode",
]  # fmt: skip
"""Kind of an audited item or a finding. `attribute` is a tensor that is not registered as a buffer, so `.to()` does not
move it. `orphan` is a parameter that is in an optimizer but in no model, or in a trained model but in no optimizer.
`mode` is a train/eval flag."""

CPU, META = torch.device("cpu"), torch.device("meta")
IMMOVABLE_PACKAGES = ("bitsandbytes", "torchao", "optimum.quanto", "quanto", "hqq")
"""Packages whose tensor classes hold quantised values and manage their own placement."""
PLAIN = (str, bytes, int, float, complex, Path, np.ndarray, np.generic, torch.dtype, torch.device, type(None))
"""Types that a batch may contain besides tensors; their values are never on a device."""


# One tensor


def device_of_values(tensor: torch.Tensor) -> torch.device:
    """The device that holds the values: of this rank's shard for a DTensor, of the partition for a ZeRO-3 parameter."""
    partition = getattr(tensor, "ds_tensor", None)
    if tensor.numel() == 0 and isinstance(partition, torch.Tensor):
        return partition.device
    local = getattr(tensor, "_local_tensor", None)
    return local.device if isinstance(local, torch.Tensor) else tensor.device


def is_partitioned(tensor: torch.Tensor) -> bool:
    """Whether DeepSpeed ZeRO-3 manages the tensor: between forwards it is empty, or on another device."""
    return hasattr(tensor, "ds_id")


def immovable_reason(tensor: object) -> str | None:
    """Why only its own package may move this tensor (it is quantised, paged or streamed), or None."""
    for kind in type(tensor).__mro__:
        if kind.__module__.startswith(IMMOVABLE_PACKAGES):
            return f"a {kind.__module__.partition('.')[0]} {type(tensor).__name__}, which its package places"
    if getattr(tensor, "is_paged", False):
        return "paged memory of bitsandbytes, which moves by itself"
    if getattr(tensor, "is_ramtorch", False):
        return "a RamTorch weight, which is streamed from CPU memory"
    return None


def skip_reason(tensor: torch.Tensor) -> str | None:
    """Why device checks skip this tensor (other software moves it before it is used), or None."""
    if is_partitioned(tensor) and tensor.numel() == 0:
        return "partitions of DeepSpeed ZeRO-3, empty between forwards"
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is not None and device_of_values(tensor).type == "cpu" != mesh.device_type:
        return f"shards that FSDP offloads to the CPU and gathers on {mesh.device_type}"
    return immovable_reason(tensor)


# Software that moves weights


class Mover(NamedTuple):
    """Software that moves a module's weights for each use: its class name, and the device if known.

    `moves_weights` and `moves_inputs` say what an offload hook of accelerate or diffusers moves.
    """

    name: str
    device: torch.device | None
    moves_weights: bool = True
    moves_inputs: bool = False


def offload_hook_of(module: torch.nn.Module) -> Mover | None:
    """The offload hook on this module itself, which has a device, or None."""
    for hook in _accelerate_hooks(module):
        device = getattr(hook, "execution_device", None)
        if device is not None:
            # AlignDevicesHook always moves inputs; its `offload` says whether it moves weights. CpuOffload has no such
            # field: it moves the weights, and the inputs only if the weights are not on the device yet.
            moves_weights = bool(getattr(hook, "offload", True))
            return Mover(type(hook).__name__, with_index(torch.device(device)), moves_weights, hasattr(hook, "offload"))
    for hook in _diffusers_hooks(module):
        device = getattr(getattr(hook, "group", None), "onload_device", None)
        if device is not None:
            return Mover(type(hook).__name__, with_index(torch.device(device)), moves_inputs=True)
    return None


def mover_inside(module: torch.nn.Module) -> Mover | None:
    """What fetches this module's weights inside its forward, or None: layer offload of ai-toolkit and of OneTrainer."""
    own = vars(module)
    if own.get("_memory_management_device") is not None:
        name = type(own.get("_layer_memory_manager", module)).__name__
        return Mover(name, with_index(torch.device(own["_memory_management_device"])))
    replaced = getattr(own.get("forward"), "__self__", None)
    conductor = own.get("conductor") or getattr(replaced, "conductor", None)
    if hasattr(conductor, "before_layer") and hasattr(conductor, "after_layer"):
        return Mover(type(conductor).__name__, None)
    return None


def movers(module: torch.nn.Module) -> dict[str, Mover]:
    """What moves the weights of submodules, by the submodules' dotted paths, outermost first.

    Besides offload hooks and `mover_inside` these are block swap of musubi-tuner and sd-scripts (`wait_for_block`) and
    of SimpleTuner (`stream_in`), which move lists of blocks: each block just before its forward.
    """
    found: dict[str, Mover] = {}
    for path, part in module.named_modules():
        own = offload_hook_of(part) or mover_inside(part)
        if own is not None:
            found[path] = own
        lists = {name: len(child) for name, child in part._modules.items() if isinstance(child, torch.nn.ModuleList)}
        for value in vars(part).values() if lists else ():
            if hasattr(value, "wait_for_block") and getattr(value, "blocks_to_swap", None):
                length, device = value.num_blocks, with_index(torch.device(value.device))
            elif hasattr(value, "stream_in") and hasattr(value, "block_indices"):
                length, device = None, None
            else:
                continue
            for name in lists:
                if length in (None, lists[name]):
                    found[f"{path}.{name}" if path else name] = Mover(type(value).__name__, device)
    return found


def replaces_parameters(module: torch.nn.Module) -> bool:
    """Whether an offload hook on this module itself replaces its Parameter objects by others.

    accelerate's AlignDevicesHook with `offload` does; `enable_sequential_cpu_offload` and `cpu_offload` install it. An
    optimizer that was built earlier keeps training the old objects, which are no longer in use.
    """
    return any(getattr(hook, "offload", False) is True for hook in _accelerate_hooks(module))


def casting_dtype_of(module: torch.nn.Module) -> torch.dtype | None:
    """The dtype that diffusers' layerwise casting makes this module itself compute in, or None without it."""
    found = (getattr(hook, "compute_dtype", None) for hook in _diffusers_hooks(module))
    return next((dtype for dtype in found if isinstance(dtype, torch.dtype)), None)


def with_index(device: torch.device) -> torch.device:
    """Resolve `cuda` to `cuda:<current>`, so that it compares equal to `tensor.device`."""
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    if device.index is not None:
        return device
    current_device = getattr(torch.get_device_module(device), "current_device", None)
    return torch.device(device.type, 0 if current_device is None else current_device())


def _accelerate_hooks(module: torch.nn.Module) -> Iterable[Any]:
    """What accelerate keeps in `_hf_hook`: one hook, or several in a SequentialHook."""
    hook = vars(module).get("_hf_hook")  # Module.__getattr__ is slow for missing attributes
    hooks: Iterable[Any] = () if hook is None else getattr(hook, "hooks", (hook,))
    return hooks


def _diffusers_hooks(module: torch.nn.Module) -> Iterable[Any]:
    """What diffusers keeps in the registry `_diffusers_hook`: group offloading, layerwise casting."""
    hooks: dict[str, Any] = getattr(vars(module).get("_diffusers_hook"), "hooks", {})
    return hooks.values()


# The tensors of a part


def named_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer of a module with its dotted name, each object once."""
    return chain(module.named_parameters(), module.named_buffers())


class PartTensor(NamedTuple):
    """One tensor of a part, its dotted name in the part, and what moves it."""

    part: str
    name: str
    kind: AuditKind
    tensor: torch.Tensor
    mover: Mover | None = None

    @property
    def path(self) -> str:
        """Part and name, dotted."""
        return f"{self.part}.{self.name}" if self.name else self.part


def is_optimizer(value: object) -> bool:
    """Whether it has an optimizer's groups and state, as the wrappers of DeepSpeed and accelerate do too."""
    return not isinstance(value, torch.nn.Module) and hasattr(value, "param_groups") and hasattr(value, "state")


def is_scaler(value: object) -> TypeGuard[torch.amp.GradScaler]:
    """Whether it is a GradScaler."""
    return isinstance(value, torch.amp.GradScaler)


def stored_by(ema: object) -> Any:
    """The model's weights that an EMA keeps while the model holds the averages, else None. torch_ema keeps the last."""
    return getattr(ema, "temp_stored_params", None) or getattr(ema, "collected_params", None)


def part_tensors(part: str, value: Any) -> Iterator[PartTensor]:
    """Every tensor of a module, an EMA or a nested batch. Optimizers and GradScalers are checked separately.

    Raises DeviceError for any other kind of part, since it may hold tensors that no check would see.
    """
    if isinstance(value, torch.nn.Module):
        yield from _module_tensors(part, value)
    elif hasattr(value, "shadow_params"):
        # `temp_stored_params` are on the CPU on purpose: restore() copies them back from there.
        for name, tensor in named_tensors(list(value.shadow_params), "shadow_params"):
            yield PartTensor(part, name, "ema", tensor)
    elif not (is_optimizer(value) or is_scaler(value)):
        for name, leaf in named_leaves(value, ""):
            if isinstance(leaf, torch.Tensor):
                yield PartTensor(part, name, "batch", leaf)
            elif not (name and isinstance(leaf, PLAIN)):
                raise DeviceError(
                    f"part {f'{part}.{name}' if name else part} is of type {type(leaf).__name__}: a part must be a "
                    "module, an optimizer, a GradScaler, an EMA, a tensor, or a mapping, list, tuple or dataclass of "
                    "tensors"
                )


def _module_tensors(part: str, module: torch.nn.Module) -> Iterator[PartTensor]:
    """Every tensor of a module and its submodules. Tied tensors are yielded once, under their first name."""
    own, moved = movers(module), dict[str, Mover | None]()
    seen: set[int] = set()
    for path, owner in module.named_modules():
        # Its own mover, else that of its nearest parent with one.
        mover = moved[path] = own.get(path) or (moved.get(path.rpartition(".")[0]) if path else None)
        prefix = f"{path}." if path else ""
        found: list[tuple[AuditKind, dict[str, Any]]] = [("parameter", owner._parameters), ("buffer", owner._buffers)]
        if mover is None:
            found.append(("attribute", vars(owner)))
        for kind, values in found:
            for name, tensor in values.items():
                if not isinstance(tensor, torch.Tensor) or id(tensor) in seen:
                    continue
                if kind == "attribute" and not tensor.ndim:
                    continue
                seen.add(id(tensor))
                yield PartTensor(part, prefix + name, kind, tensor, mover)
                if kind == "parameter" and tensor.grad is not None:
                    yield PartTensor(part, prefix + name, "gradient", tensor.grad, mover)
