"""The optimizers' part of an audit: where their state lies, and whether they train the model's own parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from latentcache.devices.audit_report import Finding
from latentcache.devices.part_tensors import Holding, is_optimizer
from latentcache.devices.prefix_map import Declared
from latentcache.devices.state_rules import unwrapped, wanted_state_device
from latentcache.devices.tensor_location import device_of_values, is_partitioned
from latentcache.utils.nested import named_tensors


class StateTensor(NamedTuple):
    """One tensor of `optimizer.state`. `key` is the state's own name, `name` has the position in nested state too."""

    part: str
    optimizer: Any
    group: Mapping[str, Any]
    param: torch.Tensor
    param_name: str
    key: str
    name: str
    value: torch.Tensor


def states_of(part: str, optimizer: Any) -> Iterator[StateTensor]:
    """Every tensor of the optimizer's state, nested ones too."""
    for group, param, param_name in params_of(optimizer):
        for key, value in dict(optimizer.state.get(param, {})).items():
            for name, tensor in named_tensors(value, str(key)):
                yield StateTensor(part, optimizer, group, param, param_name, str(key), name, tensor)


def state_findings(
    states: Iterable[StateTensor], holdings: Iterable[Holding], declared: Declared[torch.device] | None
) -> Iterator[Finding]:
    """State that breaks the rules of `state_rules`. An optimizer with a device of its own is parked there."""
    names = _owners(holdings)
    for state in states:
        owner = names.get(id(state.param))
        path = f"{owner.path if owner else state.param_name}.{state.name}"
        wanted, level, reason = wanted_state_device(state.optimizer, state.group, state.param, state.key, state.value)
        parked = declared.of(f"{state.part}.{path}") if declared is not None else None
        found = device_of_values(state.value)
        if parked is not None and wanted is not None and state.value.ndim:
            wanted, level, reason = parked, "error", "the optimizer is declared to be there"
        if wanted is not None and found != wanted:
            shape = tuple(state.value.shape)
            yield Finding(state.part, path, "optimizer state", shape, str(found), str(wanted), level, reason)


def ownership_findings(parts: Mapping[str, Any], holdings: Iterable[Holding]) -> Iterator[Finding]:
    """Parameters that an optimizer steps but no module has, and those of a module it trains that it does not step."""
    holdings = list(holdings)
    names = _owners(holdings)
    modules = [part for part, value in parts.items() if isinstance(value, torch.nn.Module)]
    optimizers = {part: value for part, value in parts.items() if is_optimizer(value)}
    if not modules or any(_keeps_copies(optimizer, holdings) for optimizer in optimizers.values()):
        return
    stepped: set[int] = set()
    trained: dict[str, str] = {}
    for part, optimizer in optimizers.items():
        for _, param, param_name in params_of(optimizer):
            stepped.add(id(param))
            if id(param) in names:
                trained.setdefault(names[id(param)].part, part)
                continue
            reason = "no module has it: it was replaced after the optimizer was made, and training it has no effect"
            found, wanted = f"an orphan on {device_of_values(param)}", f"a parameter of {' or '.join(modules)}"
            yield Finding(part, param_name, "orphan", tuple(param.shape), found, wanted, "error", reason)
    for holding in holdings:
        if holding.kind == "parameter" and holding.tensor.requires_grad and id(holding.tensor) not in stepped:
            optimizer_name = trained.get(holding.part)
            if optimizer_name is not None:
                shape, wanted = tuple(holding.tensor.shape), f"a parameter of {optimizer_name}"
                reason = "it requires grad and is never stepped"
                yield Finding(holding.part, holding.name, "orphan", shape, "in no optimizer", wanted, "warning", reason)


def _keeps_copies(optimizer: Any, holdings: Iterable[Holding]) -> bool:
    """Whether the optimizer steps copies of its own (DeepSpeed's fp32 partitions), which no module has."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return True
    return any(holding.kind == "parameter" and is_partitioned(holding.tensor) for holding in holdings)


def _owners(holdings: Iterable[Holding]) -> dict[int, Holding]:
    return {id(holding.tensor): holding for holding in holdings if holding.kind == "parameter"}


def params_of(optimizer: Any) -> Iterator[tuple[Mapping[str, Any], torch.Tensor, str]]:
    """Each parameter with its group and the optimizer's own name for it (`param_names`, which torch keeps if told)."""
    for number, group in enumerate(unwrapped(optimizer).param_groups):
        names = group.get("param_names")
        for position, param in enumerate(group["params"]):
            yield group, param, names[position] if names else f"param_groups.{number}.params.{position}"
