"""Optimizer state: on which device it belongs, and how it gets there with the flags that are in force.

The rules are those of torch's own optimizers (`torch/optim` of 2.13, "special device hosting for step" in
`optimizer.py`):

    state                          fused or capturable group      other groups
    `step`, 0-dim                  the parameter's device         the CPU; on the device each use is a host sync
    `step` of ASGD, other 0-dim    the parameter's device         the CPU or the parameter's device
    one dimension or more          the parameter's device         the parameter's device

The flags are those that the group has now: `load_state_dict` replaces them, so they must be final first.

State is moved by this table, in its own dtype: torch's `load_state_dict` takes flags from the state (a plain checkpoint
makes a fused optimizer plain), and casts state to the parameter's dtype (float32 moments of bfloat16 parameters are
rounded). Optimizers that load in a way of their own, such as those with 8-bit state, are asked to. Moving every tensor
to the device costs a host sync per use of `step`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._pytree import tree_map, tree_map_only

from latentcache.devices.tensor_location import CPU, device_of_values, immovable_reason
from latentcache.errors import CheckpointError, DeviceError
from latentcache.utils.nested import named_tensors

FLAGS = ("fused", "foreach", "capturable", "maximize", "differentiable")
"""Settings of a group that say how a step is computed. The code that builds the optimizer decides them, not a file."""


class StateRule(NamedTuple):
    """Where a state tensor belongs. `device` None: it may stay. `level` is that of being elsewhere."""

    device: torch.device | None
    level: Literal["error", "warning"]
    reason: str


class StateTensor(NamedTuple):
    """One tensor of `optimizer.state`. `key` is the state's own name; `name` adds the position in nested state."""

    optimizer: Any
    group: Mapping[str, Any]
    param: torch.Tensor
    param_name: str
    key: str
    name: str
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What `repair_optimizer` moved, a line for each tensor (`weight: exp_avg: cpu -> cuda:0`); perhaps nothing."""

    moved: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.moved) or "nothing to move"


def named_params(optimizer: Any) -> Iterator[tuple[Mapping[str, Any], torch.Tensor, str]]:
    """Each parameter with its group and its name: that of the group's `param_names`, which torch keeps if given."""
    for number, group in enumerate(unwrapped(optimizer).param_groups):
        names = group.get("param_names")
        for position, param in enumerate(group["params"]):
            yield group, param, names[position] if names else f"param_groups.{number}.params.{position}"


def state_tensors(optimizer: Any) -> Iterator[StateTensor]:
    """Every tensor of the optimizer's state, nested ones too. Wrappers are looked into."""
    for group, param, param_name in named_params(optimizer):
        for key, value in dict(optimizer.state.get(param, {})).items():
            for name, tensor in named_tensors(value, str(key)):
                yield StateTensor(optimizer, group, param, param_name, str(key), name, tensor)


def state_rule(state: StateTensor) -> StateRule:
    """The rule of the table above. A tensor obeys it if the rule's device is None or its own."""
    name, value, home = state.key, state.value, device_of_values(state.param)
    immovable = immovable_reason(value)
    if immovable:
        return StateRule(None, "error", immovable)
    if home.type == "meta":
        return StateRule(None, "error", "the parameter is on meta, which is no place for state")
    if value.ndim > 0:
        return StateRule(home, "error", "state of one dimension or more belongs on its parameter's device")
    flags = [flag for flag in ("fused", "capturable") if state.group.get(flag)]
    if flags:
        return StateRule(home, "error", f"{flags[0]}=True: the kernel reads {name} on its parameter's device")
    if device_of_values(value) not in (CPU, home):
        expected = home if name != "step" else CPU
        return StateRule(expected, "error", f"{name} is neither on the CPU nor with its parameter")
    if name == "step" and not isinstance(unwrapped(state.optimizer), torch.optim.ASGD):
        return StateRule(CPU, "warning", "without fused or capturable, step on a device costs one host sync per use")
    return StateRule(None, "error", f"a 0-dim {name} may lie on the CPU or with its parameter")


def unwrapped(optimizer: Any) -> Any:
    """The innermost optimizer: accelerate and DeepSpeed keep it in `.optimizer`."""
    while hasattr(inner := getattr(optimizer, "optimizer", None), "param_groups"):
        optimizer = inner
    return optimizer


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The torch optimizer inside wrappers such as accelerate's, whose own loading moves every tensor."""
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise DeviceError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer: this function must not move its state. "
            "A sharded engine places its own."
        )
    return optimizer


def repair_optimizer(optimizer: torch.optim.Optimizer) -> RepairReport:
    """Put the optimizer's state where its parameters are now, by the table above, and report what moved.

    Call it after `model.to(device)` and after the flags of the groups (fused, capturable, foreach) are final. No dtype
    changes, except that `step` of fused and capturable groups is float32. Tensors that are in place stay the same
    objects. Raises DeviceError for what is not a torch optimizer and for parameters on `meta`.
    """
    optimizer = _movable(optimizer)
    before = {(state.param_name, state.name): state.value.device for state in state_tensors(optimizer)}
    if _loads_by_itself(optimizer):
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        for group, param, _ in named_params(optimizer):
            values = optimizer.state.get(param, {})
            values.update(_placed(optimizer, group, param, values))
    return RepairReport(
        tuple(
            f"{state.param_name}: {state.name}: {found} -> {state.value.device}"
            for state in state_tensors(optimizer)
            if (found := before[state.param_name, state.name]) != state.value.device
        )
    )


def load_optimizer_state(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a torch optimizer's `state_dict` onto the devices that the parameters are on now.

    Flags (fused, foreach, capturable, maximize, differentiable) stay as the optimizer was built; lr, betas, weight
    decay and the like come from `state_dict`, a tensor where the optimizer has a tensor.

    Args:
        optimizer: A torch optimizer, or a wrapper that keeps one in `.optimizer`.
        state_dict: What its class's `state_dict()` gave. State keeps its dtype, and shares no memory with it.

    Raises:
        CheckpointError: The groups do not match. The optimizer is then as it was.
        DeviceError: `optimizer` is no torch optimizer, or a parameter is on `meta`.
    """
    optimizer = _movable(optimizer)
    by_itself = _loads_by_itself(optimizer)
    if not by_itself:
        state_dict = dict(state_dict)  # hooks may change it
        for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(optimizer, state_dict) or state_dict
    saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
    found = [len(group["params"]) for group in saved_groups]
    expected = [len(group["params"]) for group in optimizer.param_groups]
    if found != expected:
        raise CheckpointError(
            "optimizer state",
            f"has groups of {found} parameters, the optimizer has {expected}; build it over the same parameters",
        )
    groups = [_group_as_built(live, saved) for live, saved in zip(optimizer.param_groups, saved_groups, strict=True)]
    if by_itself:
        numbered = [{**group, "params": saved["params"]} for group, saved in zip(groups, saved_groups, strict=True)]
        optimizer.load_state_dict({**state_dict, "param_groups": numbered})
        held = {_memory(tensor) for _, tensor in named_tensors(saved_state, "")} - {0}
        for param, values in optimizer.state.items():  # torch's own loading keeps what is in its place already
            optimizer.state[param] = tree_map_only(
                torch.Tensor, lambda each: each.clone() if _memory(each) in held else each, values
            )
        return
    state: dict[Any, Any] = defaultdict(dict)
    owners: dict[Any, tuple[Mapping[str, Any], torch.Tensor]] = {}
    for group, saved in zip(groups, saved_groups, strict=True):
        owners |= {number: (group, param) for number, param in zip(saved["params"], group["params"], strict=True)}
    for number, values in saved_state.items():
        if number in owners:
            owner, param = owners[number]
            state[param] = _placed(optimizer, owner, param, values, copy=True)
        else:
            state[number] = deepcopy(values)
    optimizer.__setstate__({"state": state, "param_groups": groups})
    for loaded in optimizer._optimizer_load_state_dict_post_hooks.values():
        loaded(optimizer)


def _memory(tensor: torch.Tensor) -> int:
    """Where a plain tensor's memory begins; 0 for any other."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return tensor.untyped_storage().data_ptr() if is_plain else 0


def _movable(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The torch optimizer inside wrappers. DeviceError for parameters on `meta`."""
    optimizer = inner_optimizer(optimizer)
    params = [param for _, param, _ in named_params(optimizer)]
    num_meta = sum(param.device.type == "meta" for param in params)
    if num_meta:
        raise DeviceError(f"{num_meta} of {len(params)} optimizer parameters are on meta: load the model first")
    return optimizer


def _loads_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict


def _group_as_built(live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved group with the live one's parameters, flags, and choice between tensors and numbers."""
    kept = (*FLAGS, "params", "param_names")
    return {**live, **{key: _as_built(live.get(key), value) for key, value in saved.items() if key not in kept}}


def _as_built(live: Any, saved: Any) -> Any:
    if isinstance(live, torch.Tensor):
        return live.copy_(torch.as_tensor(saved))  # a captured graph reads a tensor lr from its address
    if isinstance(saved, torch.Tensor):
        return saved.item() if isinstance(live, (int, float)) and saved.numel() == 1 else saved.clone()
    if isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple)) and len(saved) == len(live):
        return type(live)(_as_built(a, b) for a, b in zip(live, saved, strict=True))
    return deepcopy(saved)


def _placed(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    param: torch.Tensor,
    values: Mapping[str, Any],
    *,
    copy: bool = False,
) -> dict[str, Any]:
    """The state of a parameter by the table above, in memory of its own if `copy`."""
    is_fused = bool(group.get("fused") or group.get("capturable"))

    def place(key: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return deepcopy(leaf) if copy else leaf
        home = state_rule(StateTensor(optimizer, group, param, "", key, key, leaf)).device
        device = leaf.device if home in (None, device_of_values(leaf)) else home
        # Fused kernels take no other dtype.
        return leaf.to(device, torch.float32 if key == "step" and is_fused else leaf.dtype, copy=copy)

    with torch.no_grad():
        return {key: tree_map(partial(place, str(key)), value) for key, value in values.items()}
