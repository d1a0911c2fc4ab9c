"""The parts of a model that phases switch: which modules there are, which can be moved, and which are wrongly given.

Software such as FSDP, DeepSpeed ZeRO-3, offload hooks and the packages of quantised weights places parts itself.
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
    offload_hook_of,
    replaces_parameters,
)
from latentcache.errors import PhaseError
from latentcache.phases.state import Modules, Snapshot, parameters, submodules
from latentcache.phases.weights import is_training, named_weights

SHARDING_CLASSES = {"FSDPModule": "FSDP", "FullyShardedDataParallel": "FSDP1"}
"""By name: some builds of torch have no torch.distributed. `fully_shard` gives a module the first as a base class."""


class ModelParts:
    """Modules by name, and what trains them: `optimizer`, `scaler`, `ema`.

    `wrapped` are the modules as they were given, `modules` the eager ones inside. PhaseError for a module under two
    names, and for an unknown name in `immovable`.
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
                raise PhaseError(f"{other} and {name} are one module: give it under one name", phase="none")
        self._ddp: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._find_wrappers()
        unknown = self.immovable - self.modules.keys()
        if unknown:
            raise PhaseError(f"immovable names {sorted(unknown)}; {self.known()}", phase="train")

    def known(self) -> str:
        """The names of the modules, for a message."""
        return f"the modules are {', '.join(self.modules) or 'none'}"

    def trained(self) -> list[str]:
        """The modules that have a parameter to train."""
        return [name for name, module in self.modules.items() if is_trained(module)]

    def managed(self) -> dict[str, str]:
        """The modules whose tensors other software places, with the reason: phases leave the tensors alone."""
        reasons = {name: self._managed_by(name) for name in self.modules}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def pinned(self, park: torch.device, managed: Collection[str]) -> dict[str, str]:
        """The modules, but for `managed`, that must stay in their memory, with the reason: phases move none of them.

        What lies on `park` need not: a phase that moves it gives it back in its own memory.
        """
        self._find_wrappers()
        reduced = self.reduced_parameters()
        reasons = {name: _pinned_by(part, reduced, park) for name, part in self.modules.items() if name not in managed}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def reduced_parameters(self) -> set[int]:
        """The ids of the parameters in any DistributedDataParallel that is known, while processes share gradients."""
        wrappers = [*self._ddp] if _is_distributed() else []
        return {id(parameter) for wrapper in wrappers for parameter in wrapper.parameters()}

    def _find_wrappers(self) -> None:
        """Note each DistributedDataParallel: a trainer may give the module inside as the part.

        All objects are asked, which takes up to 0.2 s. The garbage collector names no wrapper that `gc.freeze` froze.
        One around the part given, or one that was there when the phases were built, is known all the same.
        """
        if _is_distributed():
            given = (module for part in self.wrapped.values() for module in part.modules())
            objects = (*given, *gc.get_objects())
            # By class, not isinstance: that asks proxies of other packages for their __class__.
            self._ddp.update(each for each in objects if issubclass(type(each), DistributedDataParallel))

    def _managed_by(self, name: str) -> str | None:
        if name in self.immovable:
            return "declared immovable"
        reason = managed_by(self.modules[name])
        if reason is not None:
            return reason
        if moved := movers(self.modules[name]):
            # Block swap exchanges the memory of blocks: putting back what a weight had would give it another's values.
            return f"its weights are moved by {next(iter(moved.values())).name}"
        for weight, tensor in named_weights(self.modules[name]):
            reason = immovable_reason(tensor)
            if reason is not None:
                return f"{weight} is {reason}"
            if tensor.device.type == "meta":
                return f"{weight} is on meta and holds no values"
        return None

    def check_names(self, phase: str, on_device: Collection[str], training: Collection[str]) -> None:
        """PhaseError for a phase that names unknown parts, or trains parts that it parks."""
        unknown = {*on_device, *training} - self.modules.keys()
        if unknown:
            raise PhaseError(f"names {', '.join(sorted(unknown))}; {self.known()}", phase=phase)
        parked = {*training} - {*on_device}
        if parked:
            raise PhaseError(f"trains {', '.join(sorted(parked))}, which it parks: add it to on_device", phase=phase)

    def check_ready(self, phase: str, on_device: Collection[str], *, averaged: bool) -> None:
        """PhaseError for parts that cannot be trained as they are, or have no values to put on the device."""
        placed = [part for part in on_device if part in self.modules and part not in self.immovable]
        averaged = averaged and (
            self.parts.get("ema") is not None
            or any(is_optimizer(part) and is_training(unwrapped(part)) for part in self.parts.values())
        )
        checks = {
            "these are trained and under sequential offload (enable_sequential_cpu_offload, cpu_offload, "
            "align_module_device), which replaces their Parameters: an optimizer would train objects that nothing "
            "uses. Call remove_all_hooks() on the pipeline, and rebuild the optimizer. The first are:": [
                name
                for part, whole in self.modules.items()
                if any(replaces_parameters(module) for _, module in whole.named_modules())
                for name, module in submodules({part: whole})
                if replaces_parameters(module) and is_trained(module)
            ],
            "these are on meta and hold no values: load the part first": [
                f"{part}.{name}" for part in placed for name in _empty_tensors(self.modules[part])
            ],
            # It keeps those that its root gathered (see `GatheredShards`), and has no public way to release them.
            "FullyShardedDataParallel keeps the weights of a forward for the next one, also past an optimizer step or "
            "a swap of averaged weights. Enter phases after zero_grad(set_to_none=True) and without averaged weights, "
            "or shard with fully_shard. These are sharded by it:": [
                part
                for part, module in self.modules.items()
                if any(_sharding(kind) == "FSDP1" for kind in {type(each) for _, each in module.named_modules()})
                and (averaged or any(parameter.grad is not None for parameter in module.parameters()))
            ],
        }
        for message, offenders in checks.items():
            if offenders:
                raise PhaseError(message, phase=phase, offenders=tuple(offenders))


class ReducedGradients(Snapshot):
    """The hooks with which DistributedDataParallel reduces gradients. They cannot be restored, but their loss is seen.

    They hang on the gradient accumulator of each parameter. torch makes a new one, without hooks, when `.data` gets
    another device or dtype, also if that is undone.
    """

    def __init__(self, modules: Modules, reduced: Collection[int]):
        self._kept = [
            (name, p, _accumulator(p)) for name, p in parameters(modules) if id(p) in reduced and p.requires_grad
        ]

    @override
    def restore(self) -> None:
        """Nothing can be: DDP has no way to hang its hooks up again."""

    @override
    def changes(self) -> Iterator[str]:
        lost = [name for name, parameter, accumulator in self._kept if _accumulator(parameter) is not accumulator]
        if lost:
            yield (
                f"{lost[0]} and {len(lost) - 1} more parameters lost the hooks of DistributedDataParallel when code in "
                "the phase cast or moved them: their gradients would no longer be reduced. Before training goes on, "
                "wrap the module in DistributedDataParallel again, in every process"
            )


class GatheredShards(Snapshot):
    """The weights that FSDP gathered for a forward. They are resharded at both ends of a phase.

    A forward without a backward leaves those of the root gathered, and the next forward uses them as they are: it
    would miss an optimizer step, or a swap of averages, in between. Each rank reshards on its own.
    """

    def __init__(self, modules: Modules):
        self._sharded = [each for _, each in submodules(modules) if _sharding(type(each)) == "FSDP"]
        self.restore()

    @override
    def restore(self) -> None:
        for module in self._sharded:
            module.reshard()  # type: ignore[operator]  # FSDPModule adds it


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def managed_by(module: torch.nn.Module) -> str | None:
    """Why other software may change a part's tensors and hooks in a forward, or None."""
    if any(offload_hook_of(submodule) is not None for _, submodule in module.named_modules()):
        return "under offload hooks, which move it"
    return sharded_by(module)


def sharded_by(module: torch.nn.Module) -> str | None:
    """Why a forward of the module needs every process: the software that shards it. None if none does."""
    for kind in dict.fromkeys(type(each) for _, each in module.named_modules()):
        sharding = _sharding(kind)
        if sharding is not None:
            return f"{kind.__name__} is sharded by {sharding}"
    for name, tensor in named_weights(module):
        if is_partitioned(tensor):
            return f"{name} is a partition of DeepSpeed ZeRO-3"
        if hasattr(tensor, "device_mesh"):
            return f"{name} is a shard of FSDP"
    return None


def _pinned_by(module: torch.nn.Module, reduced: Collection[int], park: torch.device) -> str | None:
    """Why a module must stay in its memory, or None."""
    if reduced and any(id(parameter) in reduced for parameter in module.parameters()):
        return "under DistributedDataParallel, whose hooks a move would drop"
    for name, tensor in named_weights(module):
        if tensor.device != park and _is_shared(tensor):
            return (
                f"{name} shares its memory with another tensor, such as an optimizer's flat buffer or a kept state_dict"
            )
    return None


def _is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor has the same storage. Parking this one would part them, and free nothing."""
    storage = tensor.untyped_storage()
    num_owners: int = torch._C._storage_Use_Count(storage._cdata)
    return num_owners > 2  # the tensor, and `storage`


def _accumulator(parameter: torch.nn.Parameter) -> Any:
    with torch.inference_mode(False):
        return get_gradient_edge(parameter).node


def is_trained(module: torch.nn.Module) -> bool:
    """Whether any of the module's parameters requires grad."""
    return any(parameter.requires_grad for parameter in module.parameters())


def _empty_tensors(module: torch.nn.Module) -> list[str]:
    """The first tensor that holds no values and that no offload hook or sharding will fill, if there is one."""
    names = [name for name, t in named_weights(module) if t.device.type == "meta" and immovable_reason(t) is None]
    return names[:1] if names and managed_by(module) is None else []


def _sharding(kind: type) -> str | None:
    names = (base.__name__ for base in kind.__mro__)
    return next((SHARDING_CLASSES[name] for name in names if name in SHARDING_CLASSES), None)
