"""The parts of a training run as names and values: modules, and an optimizer whose parameters go by the modules' names.

They are saved as plain data, and compared with what is here.
Names do not depend on wrappers: DistributedDataParallel and torch.compile add prefixes, which are taken off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from latentcache.devices.optimizer import inner_optimizer
from latentcache.devices.tensor_location import is_partitioned
from latentcache.errors import CheckpointError
from latentcache.utils.nested import named_tensors

Modules: TypeAlias = "torch.nn.Module | Mapping[str, torch.nn.Module]"
"""What is trained: one module, or several by name, which then is the first part of their tensors' names."""

_COMPILED = "_orig_mod."


def unwrapped_module(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DistributedDataParallel, DataParallel and torch.compile."""
    parallel = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    inner: Any = module
    while isinstance(inner, parallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, parallel) else inner._orig_mod
    return cast(torch.nn.Module, inner)


def module_state(modules: Modules) -> dict[str, Any]:
    """The state_dict of all modules, under names that do not depend on wrappers."""
    return {
        prefix + key.replace(_COMPILED, ""): value
        for prefix, module in _by_prefix(modules)
        for key, value in module.state_dict().items()
    }


def load_module_state(modules: Modules, state: Mapping[str, Any]) -> None:
    """Copy the values into the modules' own tensors, wherever these are. The names were compared before."""
    for prefix, module in _by_prefix(modules):
        live = module.state_dict()
        # In place, so that it keeps the versions of the submodules: without one a module converts what it loads.
        live.update({key: state[prefix + key.replace(_COMPILED, "")] for key in live})
        module.load_state_dict(live)


def partitions(modules: Modules) -> list[str]:
    """The parameters that DeepSpeed ZeRO-3 manages: between forwards a process has a part of each, or nothing."""
    return [
        f"{prefix}{name}: a partition of DeepSpeed ZeRO-3; save through the engine (engine.save_checkpoint)"
        for prefix, module in _by_prefix(modules)
        for name, param in module.named_parameters()
        if is_partitioned(param)
    ]


def module_differences(saved: Mapping[str, Any], modules: Modules, part: str) -> list[str]:
    """Each tensor whose name, shape or dtype differs, and tied ones that have several values in a saved state."""
    live = module_state(modules)
    # Extra state, which is set by its name, may hold no tensor.
    there, here = ({f"{part}.{name}": "there" for name in each} | _specs(each, part) for each in (saved, live))
    found = _unequal(there, here)
    first: dict[tuple[Any, ...], str] = {}
    for name, value in live.items():
        other = first.setdefault(_place(value), name) if _has_place(value) else name
        if other != name and {name, other} <= saved.keys() and not _is_one(saved[name], saved[other]):
            found.append(f"{part}: {other}, {name} are one tensor here, and have two values in the file")
    return found


def _is_one(first: torch.Tensor, second: torch.Tensor) -> bool:
    return _place(first) == _place(second) or torch.equal(first, second)


def optimizer_state(optimizer: torch.optim.Optimizer, modules: Modules) -> tuple[dict[str, Any], list[str]]:
    """The optimizer's state with the modules' names for its parameters, and the parameters that no module has."""
    names, orphans = _parameter_names(optimizer, modules)
    return {"names": names, "state_dict": inner_optimizer(optimizer).state_dict()}, orphans


def optimizer_differences(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, modules: Modules) -> list[str]:
    """Each parameter that is at another place of another group, or only in one of the file and the optimizer."""
    names, orphans = _parameter_names(optimizer, modules)
    found = [f"optimizer: {orphan} belongs to no module of `model`" for orphan in orphans]
    if len(saved["names"]) != len(names):
        found.append(f"optimizer: {len(saved['names'])} groups in the file, {len(names)} here")
    return found + _unequal(_places(saved["names"]), _places(names))


def _places(names: Sequence[Sequence[str]]) -> dict[str, str]:
    """Where each parameter is in an optimizer, by its name."""
    found: dict[str, str] = {}
    for number, group in enumerate(names):
        found |= {f"optimizer.{name}": f"group {number}, place {place}" for place, name in enumerate(group)}
    return found


def _parameter_names(optimizer: torch.optim.Optimizer, modules: Modules) -> tuple[list[list[str]], list[str]]:
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
            name = known.get(param)
            if name is None:
                name = f"group {number} parameter {index}"
                orphans.append(f"{name} ({'x'.join(map(str, param.shape)) or 'scalar'})")
            names[-1].append(name)
    return names, orphans


def _by_prefix(modules: Modules) -> Iterator[tuple[str, torch.nn.Module]]:
    if isinstance(modules, torch.nn.Module):
        yield "", unwrapped_module(modules)
    else:
        for name, module in modules.items():
            inner = [other for other in modules if other.startswith(f"{name}.")]
            if inner:
                raise CheckpointError(
                    "model", f"{inner[0]} would have names of tensors of {name}: name it without a dot"
                )
            yield f"{name}.", unwrapped_module(module)


def _has_place(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel() > 0


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


# Plain data


_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass(slots=True)
class PlainData:
    """Makes a part's state into what torch's restricted reader reads, on the CPU, and names what cannot be written."""

    offenders: list[str] = field(default_factory=list)
    _copies: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)

    def of(self, value: Any, name: str) -> Any:
        """A copy of `value`, whose dotted path in the checkpoint is `name`. What cannot be written is an offender."""
        kind = type(value)
        if kind in _ATOMS and value != b"":  # which is pickled as a call of its class, that torch refuses
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
            f"{name}: a {kind.__module__}.{kind.__qualname__}, which is neither tensor nor plain data"
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
            problem = "on meta and holds no values; remove the offload hooks, or load the part first"
        if problem is not None:
            self.offenders.append(f"{name}: {problem}")
            return tensor
        if not _has_place(tensor):
            return tensor.detach().cpu().clone()
        place = (*_place(tensor), tensor.dtype)
        if place not in self._copies:
            # Tied weights stay one tensor. torch writes a view's whole storage, so a view is copied.
            cpu = tensor.detach().cpu()
            self._copies[place] = cpu.clone() if cpu.untyped_storage().nbytes() != cpu.nbytes else cpu
        return self._copies[place]


def differences(saved: Any, live: Any, part: str) -> list[str]:
    """Where tensors in nested dicts and lists differ in dtype or shape, or are on one side only, by dotted path."""
    return _unequal(_specs(saved, part), _specs(live, part))


def _specs(tree: Any, part: str) -> dict[str, str]:
    """Dtype and shape of each tensor."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape)) or 'scalar'}"
        for name, tensor in named_tensors(tree, part)
    }


def _unequal(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    return [
        f"{name}: {there.get(name, 'missing')} in the file, {here.get(name, 'missing')} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
