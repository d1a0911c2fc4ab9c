"""Optimizer state: on which device it belongs, and how it gets there with the flags that are in force.

The rules are those of torch's own optimizers (`torch/optim` of 2.13, "special device hosting for step" in
`optimizer.py`):

    state                          fused or capturable group      other groups
    `step`, 0-dim                  the parameter's device         the CPU; on the device each use is a host sync
    `step` of ASGD, other 0-dim    the parameter's device         the CPU or the parameter's device
    one dimension or more          the parameter's device         the parameter's device

The flags are those that the group has now: `load_state_dict` replaces them, so they must be final first.

State is moved by `torch.optim.Optimizer.load_state_dict`, which knows these rules, and which optimizers with 8-bit
state override. Moving every tensor instead costs a host sync per use of `step`. Three of its habits are undone here: it
takes flags from the state (a plain checkpoint makes a fused optimizer plain), it casts state to the parameter's dtype
(float32 moments of bfloat16 parameters are rounded), and it keeps references to the tensors that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch

from latentcache.devices.tensor_location import CPU, device_of_values, why_immovable
from latentcache.errors import CheckpointError, DeviceError
from latentcache.utils.nested import named_leaves

FLAGS = ("fused", "foreach", "capturable", "maximize", "differentiable")
"""Settings of a group that say how a step is computed. The code that builds the optimizer decides them, not a file."""


class StateRule(NamedTuple):
    """Where a state tensor belongs. `device` None: it may stay. `level` is that of being elsewhere."""

    device: torch.device | None
    level: Literal["error", "warning"]
    reason: str


class StateTensor(NamedTuple):
    """One tensor of `optimizer.state`. `key` is the state's own name; `name` adds the position in nested state.

    `owner` is the plain object that has the tensor as an attribute, e.g. the class of an optimizer with 8-bit state.
    """

    optimizer: Any
    group: Mapping[str, Any]
    param: torch.Tensor
    param_name: str
    key: str
    name: str
    value: torch.Tensor
    owner: Any = None


@dataclass(frozen=True, slots=True)
class MovedState:
    """One tensor of optimizer state, and the devices it moved between. `name` is `parameter: state`."""

    name: str
    found: torch.device
    moved_to: torch.device

    def __str__(self) -> str:
        return f"{self.name}: {self.found} -> {self.moved_to}"


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What `repair_optimizer` moved; nothing when all state was where the optimizer expects it."""

    moved: tuple[MovedState, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.moved)) or "nothing to move"


def named_params(optimizer: Any) -> Iterator[tuple[Mapping[str, Any], torch.Tensor, str]]:
    """Each parameter with its group and its name: that of the group's `param_names`, which torch keeps if given."""
    for number, group in enumerate(unwrapped(optimizer).param_groups):
        names = group.get("param_names")
        for position, param in enumerate(group["params"]):
            yield group, param, names[position] if names else f"param_groups.{number}.params.{position}"


def state_tensors(optimizer: Any) -> Iterator[StateTensor]:
    """Every tensor of the optimizer's state, nested ones and attributes of objects too. Wrappers are looked into."""
    for group, param, param_name in named_params(optimizer):
        for key, value in dict(optimizer.state.get(param, {})).items():
            for name, leaf in named_leaves(value, str(key)):
                if isinstance(leaf, torch.Tensor):
                    yield StateTensor(optimizer, group, param, param_name, str(key), name, leaf)
                elif not isinstance(leaf, type) and not why_immovable(leaf):
                    for attribute, held in getattr(leaf, "__dict__", {}).items():
                        if isinstance(held, torch.Tensor):
                            inner = f"{name}.{attribute}"
                            yield StateTensor(optimizer, group, param, param_name, str(key), inner, held, leaf)


def state_rule(state: StateTensor) -> StateRule:
    """The rule of the table above. A tensor obeys it if the rule's device is None or its own."""
    name, value, home = state.key, state.value, device_of_values(state.param)
    immovable = why_immovable(value)
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
    """Put the optimizer's state where its parameters are now, by its own policy, and report what moved.

    Where that policy is torch's, a `step` that was moved to the device goes back to the CPU by the table above, and so
    does NAdam's `mu_product`.
    Call it after `model.to(device)` and after the flags of the groups (fused, capturable, foreach) are final. No dtype
    changes, except that `step` of fused and capturable groups is float32. Tensors that are in place stay the same
    objects. Raises DeviceError for what is not a torch optimizer and for parameters on `meta`.
    """
    optimizer = inner_optimizer(optimizer)
    before = {(state.param_name, state.name): state.value.device for state in state_tensors(optimizer)}
    _load(optimizer, optimizer.state_dict(), copy=False)
    return RepairReport(
        tuple(
            MovedState(f"{state.param_name}: {state.name}", found, state.value.device)
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
    optimizer = inner_optimizer(optimizer)
    saved_groups = state_dict["param_groups"]
    found = [len(group["params"]) for group in saved_groups]
    expected = [len(group["params"]) for group in optimizer.param_groups]
    if found != expected:
        raise CheckpointError(
            "optimizer state",
            f"has groups of {found} parameters, the optimizer has {expected}; build it over the same parameters",
        )
    groups = [_group_as_built(live, saved) for live, saved in zip(optimizer.param_groups, saved_groups, strict=True)]
    _load(optimizer, {**state_dict, "param_groups": groups}, copy=True)


def _group_as_built(live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved group with the live one's flags, and its choice between tensors and numbers."""
    given = {key: value for key, value in saved.items() if key not in (*FLAGS, "params")}
    settings = {key: _as_built(live.get(key), value) for key, value in given.items()}
    flags = {flag: live[flag] for flag in FLAGS if flag in live}
    # In the order of the live group: it is part of the next state_dict.
    order = {key: None for key in live if key in settings or key in flags}
    return {**order, **settings, **flags, "params": saved["params"]}


def _as_built(live: Any, saved: Any) -> Any:
    if isinstance(saved, torch.Tensor) and isinstance(live, (int, float)) and saved.numel() == 1:
        return saved.item()
    if isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple)) and len(saved) == len(live):
        return type(live)(_as_built(a, b) for a, b in zip(live, saved, strict=True))
    if isinstance(live, torch.Tensor):
        return torch.as_tensor(saved, dtype=live.dtype, device=live.device)
    return saved


@torch.no_grad()
def _load(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], *, copy: bool) -> None:
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    num_meta = sum(param.device.type == "meta" for param in params)
    if num_meta:
        raise DeviceError(f"{num_meta} of {len(params)} optimizer parameters are on meta: load the model first")
    # A tensor lr keeps its address, from which a captured graph reads it.
    tensors = [{k: v for k, v in group.items() if isinstance(v, torch.Tensor)} for group in optimizer.param_groups]
    ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    sources = [(param, state_dict["state"].get(i)) for i, param in zip(ids, params, strict=True)]
    groups = [
        {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        for group in state_dict["param_groups"]
    ]
    optimizer.load_state_dict({**state_dict, "param_groups": groups})
    for param, source in sources:
        if source is not None:
            optimizer.state[param] = _settled(optimizer.state[param], source, copy=copy)
    # No policy moves what an object of state has inside.
    for state in list(state_tensors(optimizer)):
        home = state_rule(state).device
        if state.owner is not None and home not in (None, state.value.device):
            setattr(state.owner, state.name.rpartition(".")[2], state.value.to(home))
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        products = {} if copy else {p: source.get("mu_product") for p, source in sources if isinstance(source, Mapping)}
        on_cpu = {p: t for p, t in products.items() if isinstance(t, torch.Tensor) and t.device == CPU}
        _move_scalars(optimizer, on_cpu)
    for group, own in zip(optimizer.param_groups, tensors, strict=True):
        for key, tensor in own.items():
            group[key] = tensor.copy_(torch.as_tensor(group[key], dtype=tensor.dtype))


def _move_scalars(optimizer: torch.optim.Optimizer, on_cpu: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Put 0-dim state where the table has it; `on_cpu` holds NAdam's products that were on the CPU before.

    torch's own policy leaves a `step` on the device when neither fused nor capturable requires it there. It also moves
    NAdam's `mu_product` there, which NAdam makes on the CPU: two host syncs per parameter and step.
    """
    for state in list(state_tensors(optimizer)):
        moved = state.value
        if state.name == "step" and state.value.ndim == 0:
            moved = state.value.to(state_rule(state).device or state.value.device)
        elif state.name == "mu_product" and isinstance(optimizer, torch.optim.NAdam) and not state.group["capturable"]:
            moved = on_cpu[state.param] if state.param in on_cpu else state.value.to("cpu")
        if moved is not state.value:
            optimizer.state[state.param][state.name] = moved


def _settled(loaded: Any, source: Any, key: str | None = None, *, copy: bool) -> Any:
    """`loaded` on the device that the policy chose, with the dtype of `source`; its own memory if `copy`."""
    if isinstance(loaded, torch.Tensor) and isinstance(source, torch.Tensor):
        # The policy's float32 for `step` is right: fused kernels take no other dtype.
        if key != "step" and loaded.dtype != source.dtype and loaded.shape == source.shape:
            return source.to(loaded.device, copy=copy)
        return loaded.clone() if copy and loaded is source else loaded
    if isinstance(loaded, dict) and isinstance(source, Mapping):
        for name in loaded.keys() & source.keys():
            loaded[name] = _settled(loaded[name], source[name], name, copy=copy)
        return loaded
    if type(loaded) in (list, tuple) and isinstance(source, (list, tuple)) and len(loaded) == len(source):
        return type(loaded)(_settled(a, b, key, copy=copy) for a, b in zip(loaded, source, strict=True))
    return deepcopy(loaded) if copy and loaded is source else loaded
