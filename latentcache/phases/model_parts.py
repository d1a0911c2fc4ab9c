"""The parts of a model that phases switch: the modules, which of them can be moved, and which cannot be used.

FSDP, DeepSpeed ZeRO-3, offload hooks and quantisation packages place parts themselves.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from latentcache.checkpoints.parts import unwrapped_module
from latentcache.devices.optimizer import unwrapped
from latentcache.devices.tensor_location import (
    immovable_reason,
    is_optimizer,
    is_partitioned,
    movers,
    named_weights,
    offload_hook_of,
    replaces_parameters,
)
from latentcache.errors import PhaseError
from latentcache.phases.state import Modules, Snapshot, parameters, submodules
from latentcache.phases.weights import is_training

SHARDING_CLASSES = {"FSDPModule": "FSDP", "FullyShardedDataParallel": "FSDP1"}
"""Base classes of sharded modules, by name because some builds of torch have no torch.distributed."""


class ModelParts:
    """The modules by name, and what trains them: `optimizer`, `scaler`, `ema`.

    `wrapped` holds the modules as given, `modules` the eager ones inside. Raises PhaseError if one module has two
    names, or if `immovable` has an unknown name.
    """

    def __init__(self, parts: Mapping[str, Any], immovable: Collection[str]):
        self.parts = dict(parts)
        self.wrapped = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        self.modules = {name: unwrapped_module(part) for name, part in self.wrapped.items()}
        self.immovable = frozenset(immovable)
        names: dict[int, str] = {}
        for name, module in self.modules.items():
            other = names.setdefault(id(module), name)
            if other != name:
                raise PhaseError(f"{other} and {name} are one module: give it one name", phase="none")
        self._ddp: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._find_wrappers()
        if unknown := self.immovable - self.modules.keys():
            raise PhaseError(f"immovable names {sorted(unknown)}; {self.known()}", phase="train")

    def known(self) -> str:
        """The names of the modules, for an error message."""
        return f"the modules are {', '.join(self.modules) or 'none'}"

    def managed(self) -> dict[str, str]:
        """The modules whose tensors other software places, each with the reason. Phases leave these tensors alone."""
        reasons = {
            name: "declared immovable" if name in self.immovable else _placed_by(module)
            for name, module in self.modules.items()
        }
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def pinned(self, park: torch.device, managed: Collection[str]) -> dict[str, str]:
        """The modules besides `managed` that must keep their memory, each with the reason. Phases do not move them.

        Shared memory on `park` pins nothing, because a parked tensor gets its own memory back.
        """
        self._find_wrappers()
        reduced = self.reduced_parameters()
        reasons: dict[str, str] = {}
        for name, module in self.modules.items():
            if name in managed:
                continue
            if reduced and any(id(parameter) in reduced for parameter in module.parameters()):
                reasons[name] = "under DistributedDataParallel, whose hooks a move would drop"
                continue
            weights = (weight for weight, each in named_weights(module) if each.device != park and _is_shared(each))
            if (shared := next(weights, None)) is not None:
                reasons[name] = (
                    f"{shared} shares its memory with another tensor, such as an optimizer's flat buffer or a "
                    "state_dict that is still held"
                )
        return reasons

    def reduced_parameters(self) -> set[int]:
        """The ids of the parameters in all known DistributedDataParallel wrappers, while processes share gradients."""
        wrappers = [*self._ddp] if _is_distributed() else []
        return {id(parameter) for wrapper in wrappers for parameter in wrapper.parameters()}

    def _find_wrappers(self) -> None:
        """Record every DistributedDataParallel, since a trainer may pass only the module inside as the part.

        This searches all objects, which takes up to 0.2 s. The garbage collector does not list a wrapper that
        `gc.freeze` froze, unless it is around a given part or was alive when the phases were built.
        """
        if _is_distributed():
            given = (module for part in self.wrapped.values() for module in part.modules())
            objects = (*given, *gc.get_objects())
            # By type, because isinstance asks proxies of other packages for their __class__.
            self._ddp.update(each for each in objects if issubclass(type(each), DistributedDataParallel))

    def check_names(self, phase: str, on_device: Collection[str], training: Collection[str]) -> None:
        """Raise PhaseError if a phase names unknown parts, or trains a part that it parks."""
        if unknown := {*on_device, *training} - self.modules.keys():
            raise PhaseError(f"names {', '.join(sorted(unknown))}; {self.known()}", phase=phase)
        if parked := {*training} - {*on_device}:
            raise PhaseError(f"trains {', '.join(sorted(parked))}, which it parks: add it to on_device", phase=phase)

    def check_ready(self, phase: str, on_device: Collection[str], *, averaged: bool) -> None:
        """Raise PhaseError if a part cannot be trained as it is, or has no values to put on the device."""
        placed = [part for part in on_device if part in self.modules and part not in self.immovable]
        averaged = averaged and (
            self.parts.get("ema") is not None
            or any(is_optimizer(part) and is_training(unwrapped(part)) for part in self.parts.values())
        )
        checks = {
            "these are trained and under sequential offload (enable_sequential_cpu_offload, cpu_offload, "
            "align_module_device), which replaces their Parameters: an optimizer would train objects that nothing "
            "uses. Call remove_all_hooks() on the pipeline, and rebuild the optimizer. The first are:": [
                name for name, each in submodules(self.modules) if replaces_parameters(each) and is_trained(each)
            ],
            "these are on meta and hold no values: load the part first": [
                f"{part}.{name}" for part in placed for name in _empty_tensors(self.modules[part])
            ],
            # The root keeps them (see `GatheredShards`), and FSDP1 has no public way to release them.
            "FullyShardedDataParallel keeps the weights of one forward for the next, even past an optimizer step or a "
            "swap of averaged weights. Enter phases after zero_grad(set_to_none=True) and without averaged weights, "
            "or shard with fully_shard. These are sharded by it:": [
                part
                for part, module in self.modules.items()
                if any(_sharding(type(each)) == "FSDP1" for each in module.modules())
                and (averaged or any(parameter.grad is not None for parameter in module.parameters()))
            ],
        }
        for message, offenders in checks.items():
            if offenders:
                raise PhaseError(message, phase=phase, offenders=tuple(offenders))


class ReducedGradients(Snapshot):
    """The hooks with which DistributedDataParallel reduces gradients. They cannot be restored, but a loss is detected.

    They hang on each parameter's gradient accumulator. torch makes a new accumulator, without hooks, when `.data` gets
    another device or dtype, even if that is undone.
    """

    def __init__(self, modules: Modules, reduced: Collection[int]):
        self._kept = [
            (name, p, _accumulator(p)) for name, p in parameters(modules) if id(p) in reduced and p.requires_grad
        ]

    @override
    def restore(self) -> Iterator[str]:
        lost = [name for name, parameter, accumulator in self._kept if _accumulator(parameter) is not accumulator]
        if lost:
            yield (
                f"{lost[0]} and {len(lost) - 1} more parameters lost the hooks of DistributedDataParallel when code in "
                "the phase cast or moved them: their gradients would no longer be reduced. Before training continues, "
                "wrap the module in DistributedDataParallel again, in every process"
            )


class GatheredShards(Snapshot):
    """The weights that FSDP gathered for a forward. They are resharded at both ends of a phase.

    A forward without a backward leaves the root's weights gathered, and the next forward would use them as they are,
    missing an optimizer step or a swap of averages in between. Each rank reshards on its own.
    """

    def __init__(self, modules: Modules):
        self._sharded = [each for _, each in submodules(modules) if _sharding(type(each)) == "FSDP"]
        self.restore()

    @override
    def restore(self) -> None:
        for module in self._sharded:
            module.reshard()  # type: ignore[operator]  # FSDPModule adds it


def is_trained(module: torch.nn.Module) -> bool:
    """Whether any of the module's parameters requires grad."""
    return any(parameter.requires_grad for parameter in module.parameters())


def managed_by(module: torch.nn.Module) -> str | None:
    """Why other software may replace a part's tensors and hooks in a forward, or None."""
    if any(offload_hook_of(submodule) is not None for submodule in module.modules()):
        return "under offload hooks, which move it"
    return sharded_by(module)


def sharded_by(module: torch.nn.Module) -> str | None:
    """Why a forward of the module needs every process, or None if nothing shards it."""
    for each in module.modules():
        sharding = _sharding(type(each))
        if sharding is not None:
            return f"{type(each).__name__} is sharded by {sharding}"
    for name, tensor in named_weights(module):
        if is_partitioned(tensor):
            return f"{name} is a partition of DeepSpeed ZeRO-3"
        if hasattr(tensor, "device_mesh"):
            return f"{name} is a shard of FSDP"
    return None


def _placed_by(module: torch.nn.Module) -> str | None:
    """Why only other software may move a part's tensors, or None."""
    reason = managed_by(module)
    if reason is not None:
        return reason
    if moved := movers(module):
        # Block swap exchanges the memory of blocks, so a weight's old memory may hold another weight's values.
        return f"its weights are moved by {next(iter(moved.values())).name}"
    for name, tensor in named_weights(module):
        reason = immovable_reason(tensor)
        if reason is not None:
            return f"{name} is {reason}"
        if tensor.device.type == "meta":
            return f"{name} is on meta and holds no values"
    return None


def _empty_tensors(module: torch.nn.Module) -> list[str]:
    """The first tensor without values, unless offload hooks or sharding will fill it."""
    names = [name for name, t in named_weights(module) if t.device.type == "meta" and immovable_reason(t) is None]
    return names[:1] if names and managed_by(module) is None else []


def _is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor has the same storage. Parking this one would separate the two and free nothing."""
    storage = tensor.untyped_storage()
    num_owners: int = torch._C._storage_Use_Count(storage._cdata)
    return num_owners > 2  # the tensor, and `storage`


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _accumulator(parameter: torch.nn.Parameter) -> Any:
    with torch.inference_mode(False):
        return get_gradient_edge(parameter).node


def _sharding(kind: type) -> str | None:
    names = (base.__name__ for base in kind.__mro__)
    return next((SHARDING_CLASSES[name] for name in names if name in SHARDING_CLASSES), None)
