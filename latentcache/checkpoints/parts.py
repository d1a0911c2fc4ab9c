"""The parts of a training run as names and values: modules, and an optimizer whose parameters go by the modules' names.

Names do not depend on wrappers: DistributedDataParallel and torch.compile add prefixes, which are taken off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, cast

import torch

from latentcache.checkpoints.state_codec import differences
from latentcache.devices.optimizer import inner_optimizer, load_optimizer_state
from latentcache.devices.tensor_location import is_partitioned

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
        module.load_state_dict({key: state[prefix + key.replace(_COMPILED, "")] for key in module.state_dict()})


def partitions(modules: Modules) -> list[str]:
    """The parameters that DeepSpeed ZeRO-3 manages: between forwards a process has a part of each, or nothing."""
    return [
        f"{prefix}{name}: a partition of DeepSpeed ZeRO-3; save through the engine (engine.save_checkpoint)"
        for prefix, module in _by_prefix(modules)
        for name, param in module.named_parameters()
        if is_partitioned(param)
    ]


def module_differences(saved: Mapping[str, Any], modules: Modules, part: str) -> list[str]:
    """Each tensor whose name, shape, dtype or tying differs between a saved state and the modules."""
    live = module_state(modules)
    found = differences(saved, live, part)
    for names in _tied(live):
        if len({id(saved[name]) for name in names if name in saved}) > 1:
            found.append(f"{part}: {', '.join(names)} are one tensor here and several in the file")
    for names in _tied(saved):
        here = [live[name] for name in names if isinstance(live.get(name), torch.Tensor)]
        if len({_place(tensor) for tensor in here}) > 1:
            found.append(f"{part}: {', '.join(names)} are one tensor in the file and several here")
    return found


def optimizer_state(optimizer: torch.optim.Optimizer, modules: Modules) -> tuple[dict[str, Any], list[str]]:
    """The optimizer's state by the modules' names for its parameters, and the parameters that no module has."""
    names, orphans = _parameter_names(optimizer, modules)
    state = inner_optimizer(optimizer).state_dict()
    name_of: dict[Any, str] = {}
    groups = []
    for group, group_names in zip(state["param_groups"], names, strict=True):
        name_of |= dict(zip(group["params"], group_names, strict=True))
        settings = {key: value for key, value in group.items() if key != "param_names"}
        groups.append({**settings, "params": group_names})
    by_name = {name_of[key]: value for key, value in state["state"].items() if key in name_of}
    others = {key: value for key, value in state["state"].items() if key not in name_of}
    rest = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return {"state": by_name, "other_state": others, "groups": groups, "rest": rest}, orphans


def optimizer_differences(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, modules: Modules) -> list[str]:
    """Each parameter that is in another group, or only in one of the file and the optimizer."""
    names, orphans = _parameter_names(optimizer, modules)
    found = [f"optimizer: {orphan} belongs to no module of `model`" for orphan in orphans]
    here = {name: number for number, group in enumerate(names) for name in group}
    there = {name: number for number, group in enumerate(saved["groups"]) for name in group["params"]}
    found += differences(there, here, "optimizer")
    for name in sorted(here.keys() & there.keys()):
        if here[name] != there[name]:
            found.append(f"optimizer.{name}: group {there[name]} in the file, group {here[name]} here")
    return found


def load_named_optimizer_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], modules: Modules) -> None:
    """Load what `optimizer_state` returned; parameters may be in another order. The names were compared before."""
    names, _ = _parameter_names(optimizer, modules)
    number_of: dict[str, int] = {}
    groups = []
    for group, group_names in zip(saved["groups"], names, strict=True):
        number_of |= {name: len(number_of) + offset for offset, name in enumerate(group_names)}
        groups.append({**group, "params": [number_of[name] for name in group_names]})
    state = {number_of[name]: value for name, value in saved["state"].items()}
    load_optimizer_state(
        optimizer, {**saved["rest"], "state": {**state, **saved["other_state"]}, "param_groups": groups}
    )


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
            yield f"{name}.", unwrapped_module(module)


def _tied(state: Mapping[str, Any]) -> list[list[str]]:
    places = {name: _place(value) for name, value in state.items() if isinstance(value, torch.Tensor) and value.numel()}
    shared = {place for place, count in Counter(places.values()).items() if count > 1}
    return [[name for name, place in places.items() if place == tied] for tied in shared]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
