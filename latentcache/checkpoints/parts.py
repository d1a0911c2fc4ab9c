"""The parts of a training run as plain data: modules by their tensors' names, optimizers by their parameters' names.

They are saved in this form, and compared with the live objects before a load. Names do not depend on wrappers: the
prefixes that DistributedDataParallel and torch.compile add are removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from latentcache.devices.optimizer import inner_optimizer
from latentcache.devices.tensor_location import is_partitioned
from latentcache.errors import CheckpointError
from latentcache.utils.nested import named_tensors

Modules: TypeAlias = "torch.nn.Module | Mapping[str, torch.nn.Module]"
"""What is trained: one module, or several by name; a module's name is then the prefix of its tensors' names."""

OPEN_PHASES: list[Any] = []
"""The open phases of this process, with `name` and `modules`. `latentcache.phases` keeps the list."""

_COMPILED = "_orig_mod."


def unwrapped_module(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DistributedDataParallel, DataParallel and torch.compile."""
    parallel = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    inner: Any = module
    while isinstance(inner, parallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, parallel) else inner._orig_mod
    return cast(torch.nn.Module, inner)


def module_state(modules: Modules) -> dict[str, Any]:
    """The state_dict of all modules, with names that do not depend on wrappers.

    Raises CheckpointError within a phase, in which a module holds another state than the training's.
    """
    given = {id(parameter) for _, module in _by_prefix(modules) for parameter in module.parameters()}
    for phase in OPEN_PHASES:
        if any(id(parameter) in given for part in phase.modules.values() for parameter in part.parameters()):
            detail = f"is in the phase {phase.name}, which may hold averaged weights and undo a load"
            raise CheckpointError("model", f"{detail}: save or load it after the phase")
    return {
        prefix + key.replace(_COMPILED, ""): value
        for prefix, module in _by_prefix(modules)
        for key, value in module.state_dict().items()
    }


def load_module_state(modules: Modules, state: Mapping[str, Any]) -> None:
    """Copy the values into the modules' own tensors, on any device. The names must have been compared before."""
    for prefix, module in _by_prefix(modules):
        live = module.state_dict()
        # Updated in place to keep the submodules' versions: without one a module would convert its values as outdated.
        live.update({key: state[prefix + key.replace(_COMPILED, "")] for key in live})
        module.load_state_dict(live)


def partitions(modules: Modules) -> list[str]:
    """The parameters under DeepSpeed ZeRO-3: between forwards a process holds only a part of each, or nothing."""
    return [
        f"{prefix}{name}: a partition of DeepSpeed ZeRO-3; save through the engine (engine.save_checkpoint)"
        for prefix, module in _by_prefix(modules)
        for name, param in module.named_parameters()
        if is_partitioned(param)
    ]


def module_differences(saved: Mapping[str, Any], modules: Modules, part: str) -> list[str]:
    """Each tensor whose name, shape or dtype differs, and tensors that are tied here but have two values in `saved`."""
    live = module_state(modules)
    # Extra state, which is set by its name, may hold no tensor.
    there, here = ({f"{part}.{name}": "present" for name in each} | _specs(each, part) for each in (saved, live))
    found = _unequal(there, here)
    first: dict[tuple[Any, ...], str] = {}
    for name, value in live.items():
        other = first.setdefault(_place(value), name) if _has_place(value) else name
        if other != name and {name, other} <= saved.keys():
            one, two = saved[other], saved[name]
            if _place(one) != _place(two) and not torch.equal(one, two):
                found.append(f"{part}: {other}, {name} are one tensor here, and have two values in the file")
    return found


def optimizer_state(optimizer: torch.optim.Optimizer, modules: Modules) -> tuple[dict[str, Any], list[str]]:
    """The optimizer's state with the modules' names for its parameters, and the parameters that are in no module."""
    names, orphans = _parameter_names(optimizer, modules)
    return {"names": names, "state_dict": inner_optimizer(optimizer).state_dict()}, orphans


def optimizer_differences(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, modules: Modules) -> list[str]:
    """Each parameter whose group or place in it differs, or that only the file or only the optimizer has."""
    names, found = _parameter_names(optimizer, modules)
    if len(saved["names"]) != len(names):
        found.append(f"optimizer: {len(saved['names'])} groups in the file, {len(names)} here")
    there, here = (
        {
            f"optimizer.{name}": f"group {number}, place {place}"
            for number, group in enumerate(groups)
            for place, name in enumerate(group)
        }
        for groups in (saved["names"], names)
    )
    return found + _unequal(there, here)


def _parameter_names(optimizer: torch.optim.Optimizer, modules: Modules) -> tuple[list[list[str]], list[str]]:
    """The modules' names for each group's parameters, and a line about each parameter that is in no module."""
    known = {
        param: prefix + name.replace(_COMPILED, "")
        for prefix, module in _by_prefix(modules)
        for name, param in module.named_parameters()
    }
    names: list[list[str]] = []
    orphans = []
    for number, group in enumerate(inner_optimizer(optimizer).param_groups):
        names.append([])
        for index, param in enumerate(group["params"]):
            name = known.get(param, f"group {number} parameter {index}")
            names[-1].append(name)
            if param not in known:
                remedy = "name all trained modules, model={'unet': unet, ...}"
                orphans.append(f"optimizer: {name} ({_shape(param)}) is in no module of `model`: {remedy}")
    return names, orphans


def _by_prefix(modules: Modules) -> Iterator[tuple[str, torch.nn.Module]]:
    if isinstance(modules, torch.nn.Module):
        yield "", unwrapped_module(modules)
    else:
        for name, module in modules.items():
            inner = [other for other in modules if other.startswith(f"{name}.")]
            if inner:
                detail = f"the name {inner[0]} clashes with tensor names inside {name}: use a name without a dot"
                raise CheckpointError("model", detail)
            yield f"{name}.", unwrapped_module(module)


def _has_place(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel() > 0


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


# Plain data


_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass(slots=True)
class PlainData:
    """Converts a part's state to what `weights_only` can read, on the CPU, and collects what cannot be written."""

    offenders: list[str] = field(default_factory=list)
    _copies: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)

    def of(self, value: Any, name: str) -> Any:
        """A copy of `value`, whose dotted path in the checkpoint is `name`, for error messages."""
        kind = type(value)
        if kind in _ATOMS and value != b"":  # b"" is pickled as a call, which torch refuses
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if isinstance(value, np.generic):
            return self.of(value.item(), name)
        if kind in (list, tuple, set):
            return kind(self.of(item, f"{name}.{index}") for index, item in enumerate(value))
        if kind is Counter or (isinstance(value, dict) and kind.__module__ in ("builtins", "collections")):
            pairs = {self.of(key, f"{name} key"): self.of(item, f"{name}.{key}") for key, item in value.items()}
            return Counter(pairs) if kind is Counter else pairs
        self.offenders.append(
            f"{name}: a {kind.__module__}.{kind.__qualname__}, which is neither a tensor nor plain data"
        )
        return None

    def _tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        problem = None
        if hasattr(tensor, "full_tensor"):
            problem = "a sharded DTensor; save with torch.distributed.checkpoint"
        elif type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            kind = type(tensor).__name__
            problem = f"a {kind}, whose values are not a plain tensor; leave that part out of the checkpoint"
        elif tensor.device.type == "meta":
            problem = "on meta without values; remove the offload hooks, or load the part first"
        if problem is not None:
            self.offenders.append(f"{name}: {problem}")
            return tensor
        if not _has_place(tensor):
            return tensor.detach().cpu().clone()
        place = (*_place(tensor), tensor.dtype)
        if place not in self._copies:
            # Tied weights stay one tensor. A view is copied, since torch would write its whole storage.
            cpu = tensor.detach().cpu()
            self._copies[place] = cpu.clone() if cpu.untyped_storage().nbytes() != cpu.nbytes else cpu
        return self._copies[place]


def differences(saved: Any, live: Any, part: str) -> list[str]:
    """The dotted paths of tensors that differ in dtype or shape, or that only one side has, in nested data."""
    return _unequal(_specs(saved, part), _specs(live, part))


def _specs(tree: Any, part: str) -> dict[str, str]:
    """Dtype and shape of each tensor."""
    tensors = named_tensors(tree, part)
    return {name: f"{str(tensor.dtype).removeprefix('torch.')} {_shape(tensor)}" for name, tensor in tensors}


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def _unequal(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    return [
        f"{name}: {there.get(name, 'missing')} in the file, {here.get(name, 'missing')} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
