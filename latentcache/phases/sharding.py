"""Parts that other software manages: FSDP, DeepSpeed ZeRO-3, offload hooks, and the packages of quantised weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from latentcache.devices.offload import offload_hook_of, replaces_parameters
from latentcache.devices.tensor_location import is_partitioned, why_immovable
from latentcache.errors import PhaseError
from latentcache.phases.weights import named_weights

SHARDING_CLASSES = {"FSDPModule": "FSDP", "FullyShardedDataParallel": "FSDP1"}
"""By name: some builds of torch have no torch.distributed. `fully_shard` gives a module the first as a base class."""


class GatheredShards:
    """The weights that FSDP gathered for a forward. They are resharded at both ends of a phase.

    A forward without a backward leaves those of the root gathered, and the next forward uses them as they are: it
    would miss an optimizer step, or a swap of averages, in between. Each rank reshards on its own.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]):
        self._sharded = [m for module in modules.values() for m in module.modules() if _sharding(type(m)) == "FSDP"]
        self.restore()

    def restore(self) -> None:
        """Reshard every module."""
        for module in self._sharded:
            module.reshard()  # type: ignore[operator]  # FSDPModule adds it

    def changes(self) -> Iterator[str]:
        """None: gathered weights are no state to restore."""
        yield from ()


def why_rearranged(module: torch.nn.Module) -> str | None:
    """Why other software may change a part's tensors and hooks in a forward, or None."""
    if any(offload_hook_of(submodule) is not None for submodule in module.modules()):
        return "under offload hooks, which move it"
    return why_sharded(module)


def why_sharded(module: torch.nn.Module) -> str | None:
    """Why a forward of the module needs every process: the software that shards it. None if none does."""
    for kind in dict.fromkeys(map(type, module.modules())):
        sharding = _sharding(kind)
        if sharding is not None:
            return f"{kind.__name__} is sharded by {sharding}"
    for name, tensor in named_weights(module):
        if is_partitioned(tensor):
            return f"{name} is a partition of DeepSpeed ZeRO-3"
        if hasattr(tensor, "device_mesh"):
            return f"{name} is a shard of FSDP"
    return None


def why_not_moved(module: torch.nn.Module) -> str | None:
    """Why a part cannot be moved: other software places it, it is quantised, or it has no values. Else None."""
    reason = why_rearranged(module)
    if reason is not None:
        return reason
    for name, tensor in named_weights(module):
        reason = why_immovable(tensor)
        if reason is not None:
            return f"{name} is {reason}"
        if tensor.device.type == "meta":
            return f"{name} is on meta and holds no values"
    return None


def empty_tensor(module: torch.nn.Module) -> str | None:
    """The name of a tensor that holds no values and that no offload hook or sharding will fill, or None."""
    names = (name for name, t in named_weights(module) if t.device.type == "meta" and why_immovable(t) is None)
    name = next(names, None)
    return None if name is None or why_rearranged(module) is not None else name


def is_trained(module: torch.nn.Module) -> bool:
    """Whether any of the module's parameters requires grad."""
    return any(parameter.requires_grad for parameter in module.parameters())


def check_trainable(phase: str, modules: Mapping[str, torch.nn.Module]) -> None:
    """Raise PhaseError if what is trained is under sequential offload."""
    offenders = tuple(
        f"{part}.{path}" if path else part
        for part, module in modules.items()
        for path, submodule in module.named_modules()
        if replaces_parameters(submodule) and is_trained(submodule)
    )
    if offenders:
        raise PhaseError(
            "these are trained and under sequential offload (enable_sequential_cpu_offload, cpu_offload, "
            "align_module_device), which replaces their Parameters: an optimizer would train objects that nothing "
            "uses. Call remove_all_hooks() on the pipeline, and rebuild the optimizer. The first are:",
            phase=phase,
            offenders=offenders,
        )


def check_filled(phase: str, modules: Mapping[str, torch.nn.Module]) -> None:
    """Raise PhaseError if one of these, which a phase puts on the device, has no values."""
    empty = {part: empty_tensor(module) for part, module in modules.items()}
    offenders = tuple(f"{part}.{name}" for part, name in empty.items() if name is not None)
    if offenders:
        raise PhaseError("these are on meta and hold no values: load the part first", phase=phase, offenders=offenders)


def check_current(phase: str, modules: Mapping[str, torch.nn.Module], *, averaged: bool) -> None:
    """Raise PhaseError if a FullyShardedDataParallel would train with the weights of a phase's forward.

    It keeps those that its root gathered (see `GatheredShards`), and has no public way to release them.
    """
    offenders = tuple(
        part
        for part, module in modules.items()
        if any(_sharding(kind) == "FSDP1" for kind in set(map(type, module.modules())))
        and (averaged or any(parameter.grad is not None for parameter in module.parameters()))
    )
    if offenders:
        raise PhaseError(
            "FullyShardedDataParallel keeps the weights of a forward for the next one, also past an optimizer step or "
            "a swap of averaged weights. Enter phases after zero_grad(set_to_none=True) and without averaged weights, "
            "or shard with fully_shard. These are sharded by it:",
            phase=phase,
            offenders=offenders,
        )


def _sharding(kind: type) -> str | None:
    names = (base.__name__ for base in kind.__mro__)
    return next((SHARDING_CLASSES[name] for name in names if name in SHARDING_CLASSES), None)
