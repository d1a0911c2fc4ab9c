"""Optimizer state: the device it belongs on, and loading and moving it without changing the groups' flags.

The rules are those of torch's own optimizers (`torch/optim` of 2.13, "special device hosting for step" in
`optimizer.py`):

    state                          fused or capturable group      other groups
    `step`, 0-dim                  the parameter's device         the CPU; on the device each use is a host sync
    `step` of ASGD, other 0-dim    the parameter's device         the CPU or the parameter's device
    one dimension or more          the parameter's device         the parameter's device

The flags are the group's present ones. Set them before state is moved; torch's `load_state_dict` replaces them.

State is moved by this table and keeps its dtype. torch's `load_state_dict` takes the flags from the state, so that a
plain checkpoint makes a fused optimizer plain, and casts state to the parameter's dtype, which rounds float32 moments
of bfloat16 parameters. Classes that override `load_state_dict`, such as those with 8-bit state, load through it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._pytree import tree_map

from latentcache.devices.tensor_location import CPU, device_of_values, immovable_reason
from latentcache.errors import CheckpointError, DeviceError
from latentcache.utils.nested import named_tensors

FLAGS = ("fused", "foreach", "capturable", "maximize", "differentiable")
"""Group settings that select how a step is computed. They come from the code that builds the optimizer, not a file."""


class StateRule(NamedTuple):
    """Where a state tensor belongs; `device` None means that it may stay. `level` is the severity of a violation."""

    device: torch.device | None
    level: Literal["error", "warning"]
    reason: str


class StateTensor(NamedTuple):
    """One tensor of `optimizer.state`. `key` is its key there; `name` adds the position inside nested state."""

    param: torch.Tensor
    param_name: str
    key: str
    name: str
    value: torch.Tensor
    rule: StateRule


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What `repair_optimizer` moved, one line per tensor (`weight: exp_avg: cpu -> cuda:0`); may be empty."""

    moved: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.moved) or "nothing to move"


def named_params(optimizer: Any) -> Iterator[tuple[Mapping[str, Any], torch.Tensor, str]]:
    """Each parameter with its group and its name, from the group's `param_names` if torch was given names."""
    for number, group in enumerate(unwrapped(optimizer).param_groups):
        names = group.get("param_names")
        for position, param in enumerate(group["params"]):
            yield group, param, names[position] if names else f"param_groups.{number}.params.{position}"


def state_tensors(optimizer: Any) -> Iterator[StateTensor]:
    """Every tensor of the optimizer's state, including nested ones. Wrappers of optimizers are unwrapped."""
    for group, param, param_name in named_params(optimizer):
        for key, value in dict(optimizer.state.get(param, {})).items():
            for name, tensor in named_tensors(value, str(key)):
                rule = _rule(optimizer, group, param, str(key), tensor)
                yield StateTensor(param, param_name, str(key), name, tensor, rule)


def _rule(optimizer: Any, group: Mapping[str, Any], param: torch.Tensor, key: str, value: torch.Tensor) -> StateRule:
    """The rule of the table above. A tensor obeys it if the rule's device is None or its own."""
    home = device_of_values(param)
    immovable = immovable_reason(value)
    if immovable:
        return StateRule(None, "error", immovable)
    if home.type == "meta":
        return StateRule(None, "error", "the parameter is on meta, where state cannot be")
    if value.ndim > 0:
        return StateRule(home, "error", "state of one dimension or more belongs on its parameter's device")
    flags = [flag for flag in ("fused", "capturable") if group.get(flag)]
    if flags:
        return StateRule(home, "error", f"{flags[0]}=True: the kernel reads {key} on its parameter's device")
    if device_of_values(value) not in (CPU, home):
        expected = home if key != "step" else CPU
        return StateRule(expected, "error", f"{key} is neither on the CPU nor on its parameter's device")
    if key == "step" and not isinstance(unwrapped(optimizer), torch.optim.ASGD):
        return StateRule(CPU, "warning", "without fused or capturable, step on a device costs one host sync per use")
    return StateRule(None, "error", f"a 0-dim {key} may be on the CPU or on its parameter's device")


def unwrapped(optimizer: Any) -> Any:
    """The innermost optimizer: wrappers of accelerate and DeepSpeed keep it in `.optimizer`."""
    while hasattr(inner := getattr(optimizer, "optimizer", None), "param_groups"):
        optimizer = inner
    return optimizer


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The torch optimizer inside wrappers, such as accelerate's, whose own loading moves every tensor.

    Raises DeviceError if there is none.
    """
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise DeviceError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer, so its state must not be moved here. "
            "A sharded engine places its own state."
        )
    return optimizer


def repair_optimizer(optimizer: torch.optim.Optimizer) -> RepairReport:
    """Move the optimizer's state to where its parameters are now, and report what moved.

    `step` of groups that are neither fused nor capturable goes to the CPU, where torch expects it. Call this after
    `model.to(device)` and after the groups' flags (fused, capturable, foreach) are final. Dtypes do not change, except
    that `step` of fused and capturable groups becomes float32. Tensors that are in place stay the same objects.

    Args:
        optimizer: A torch optimizer, or a wrapper that keeps one in `.optimizer`.

    Returns:
        What was moved.

    Raises:
        DeviceError: `optimizer` is not a torch optimizer, or a parameter is on `meta`.
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

    Flags (fused, foreach, capturable, maximize, differentiable) stay as the optimizer was built. lr, betas, weight
    decay and the like come from `state_dict`; a setting that is a tensor in the optimizer stays that tensor.

    Args:
        optimizer: A torch optimizer, or a wrapper that keeps one in `.optimizer`.
        state_dict: What `state_dict()` of its class returned. State keeps its dtype, and is copied.

    Raises:
        CheckpointError: `state_dict` is not that of an optimizer, or its groups do not match. Nothing has changed then.
        DeviceError: `optimizer` is not a torch optimizer, or a parameter is on `meta`.
    """
    optimizer = _movable(optimizer)
    if not {"state", "param_groups"} <= set(state_dict or ()):
        detail = "has no `state` and `param_groups`: give what the state_dict() of an optimizer returned"
        raise CheckpointError("optimizer state", detail)
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
        # torch's loading does not copy tensors that need no move.
        copied = tree_map(lambda each: each.clone() if type(each) is torch.Tensor else each, saved_state)
        optimizer.load_state_dict({**state_dict, "state": copied, "param_groups": numbered})
        return
    owners = {
        number: (group, param)
        for group, saved in zip(groups, saved_groups, strict=True)
        for number, param in zip(saved["params"], group["params"], strict=True)
    }
    state: dict[Any, Any] = defaultdict(dict)
    for number, values in saved_state.items():
        if number in owners:
            owner, param = owners[number]
            state[param] = _placed(optimizer, owner, param, values, copy=True)
        else:
            state[number] = deepcopy(values)
    optimizer.__setstate__({"state": state, "param_groups": groups})
    for loaded in optimizer._optimizer_load_state_dict_post_hooks.values():
        loaded(optimizer)


def _movable(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The torch optimizer inside wrappers. Raises DeviceError if parameters are on `meta`."""
    optimizer = inner_optimizer(optimizer)
    params = [param for _, param, _ in named_params(optimizer)]
    num_meta = sum(param.device.type == "meta" for param in params)
    if num_meta:
        raise DeviceError(f"{num_meta} of {len(params)} optimizer parameters are on meta: load the model first")
    return optimizer


def _loads_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict


def _group_as_built(live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved group with the live one's parameters and flags, and a tensor or a number for each setting as there."""
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
    """The state of a parameter, placed by the table above; `copy` copies what is in place already."""
    is_fused = bool(group.get("fused") or group.get("capturable"))

    def place(key: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return deepcopy(leaf) if copy else leaf
        home = _rule(optimizer, group, param, key, leaf).device
        device = leaf.device if home in (None, device_of_values(leaf)) else home
        # Fused kernels accept no other dtype of `step`.
        return leaf.to(device, torch.float32 if key == "step" and is_fused else leaf.dtype, copy=copy)

    with torch.no_grad():
        return {key: tree_map(partial(place, str(key)), value) for key, value in values.items()}
