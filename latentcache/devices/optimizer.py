"""Optimizer state where the parameters are: moved by the optimizer's own policy, with the flags that are in force.

`torch.optim.Optimizer.load_state_dict` is that policy. It knows that `step` stays on the CPU unless the group is fused
or capturable, and optimizers with 8-bit state override it. Moving every tensor instead costs a host sync per use of
`step`. Three of its habits are undone here: it takes flags from the state (a plain checkpoint makes a fused
optimizer plain), it casts state to the parameter's dtype (float32 moments of bfloat16 parameters are rounded), and it
keeps references to the tensors that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from latentcache.devices.state_rules import unwrapped, wanted_state_device
from latentcache.errors import CheckpointError, DeviceError

FLAGS = ("fused", "foreach", "capturable", "maximize", "differentiable")
"""Settings of a group that say how a step is computed. They belong to who builds the optimizer, not to a file."""


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
    """What `repair_optimizer` moved; nothing when all state was where the optimizer wants it."""

    moved: tuple[MovedState, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.moved)) or "nothing to move"


def repair_optimizer(optimizer: torch.optim.Optimizer) -> RepairReport:
    """Put the optimizer's state where its parameters are now, by its own policy, and say what moved.

    Where that policy is torch's, a `step` that someone moved to the device goes back to the CPU, as `state_rules` says,
    and so does NAdam's `mu_product`.
    Call it after `model.to(device)` and after the flags of the groups (fused, capturable, foreach) are final. No dtype
    changes, except that `step` of fused and capturable groups is float32. Tensors that are in place stay the same
    objects. Raises DeviceError for what is not a torch optimizer and for parameters on `meta`.
    """
    optimizer = inner_optimizer(optimizer)
    before = {(name, path): tensor.device for name, path, tensor in named_state(optimizer)}
    _load(optimizer, optimizer.state_dict(), copy=False)
    moved = (
        MovedState(f"{name}: {path}", before[name, path], tensor.device)
        for name, path, tensor in named_state(optimizer)
        if before[name, path] != tensor.device
    )
    return RepairReport(tuple(moved))


def load_optimizer_state(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a torch optimizer's `state_dict` onto the devices that the parameters are on now.

    Flags stay as the optimizer was built; lr, betas, weight decay and the like come from `state_dict`, a tensor where
    the optimizer has a tensor. State keeps its dtype and shares no memory with `state_dict`. Raises CheckpointError if
    the groups do not match, and DeviceError as `repair_optimizer` does. The optimizer is then as it was.
    """
    optimizer = inner_optimizer(optimizer)
    saved_groups = state_dict["param_groups"]
    found = [len(group["params"]) for group in saved_groups]
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    if found != wanted:
        raise CheckpointError(
            "optimizer state",
            f"has groups of {found} parameters, the optimizer has {wanted}; build it over the same parameters",
        )
    groups = [group_as_built(live, saved) for live, saved in zip(optimizer.param_groups, saved_groups, strict=True)]
    _load(optimizer, {**state_dict, "param_groups": groups}, copy=True)


def group_as_built(live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved group with the live one's flags, and its choice between tensors and numbers."""
    given = {key: value for key, value in saved.items() if key not in (*FLAGS, "params")}
    settings = {key: _as_built(live.get(key), value) for key, value in given.items()}
    flags = {flag: live[flag] for flag in FLAGS if flag in live}
    # In the order of the live group: it is part of the next state_dict.
    order = {key: None for key in live if key in settings or key in flags}
    return {**order, **settings, **flags, "params": saved["params"]}


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The torch optimizer inside wrappers such as accelerate's, whose own loading moves every tensor."""
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise DeviceError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer: its state is not this function's to move. "
            "A sharded engine places its own."
        )
    return optimizer


def named_state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Every tensor of state: the parameter's name (`group 0 parameter 3` if it has none), the state's, the tensor."""
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"group {number} parameter {i}" for i in range(len(group["params"]))]
        for name, param in zip(names, group["params"], strict=True):
            yield from ((name, path, tensor) for path, tensor in _tensors(optimizer.state.get(param, {})))


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _tensors(inner, f"{path}.{index}")


@torch.no_grad()
def _load(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], *, copy: bool) -> None:
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    num_meta = sum(param.device.type == "meta" for param in params)
    if num_meta:
        raise DeviceError(f"{num_meta} of {len(params)} optimizer parameters are on meta: load the model first")
    # A caller may hold a tensor lr, and a captured graph reads it at its address.
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
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        on_cpu = {} if copy else {p: source["mu_product"] for p, source in sources if _has_cpu_product(source)}
        _bring_scalars_home(optimizer, on_cpu)
    for group, own in zip(optimizer.param_groups, tensors, strict=True):
        for key, tensor in own.items():
            group[key] = tensor.copy_(torch.as_tensor(group[key], dtype=tensor.dtype))


def _has_cpu_product(source: Any) -> bool:
    product = source.get("mu_product") if isinstance(source, Mapping) else None
    return isinstance(product, torch.Tensor) and product.device.type == "cpu"


def _bring_scalars_home(optimizer: torch.optim.Optimizer, on_cpu: Mapping[torch.Tensor, torch.Tensor]) -> None:
    # torch's own policy leaves a `step` on the device when neither fused nor capturable wants it there, and it moves
    # NAdam's `mu_product` there, which NAdam makes on the CPU: two host syncs per parameter and step.
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            step, mu_product = state.get("step"), state.get("mu_product")
            if isinstance(step, torch.Tensor) and step.ndim == 0:
                wanted = wanted_state_device(optimizer, group, param, "step", step).device
                if wanted is not None:
                    state["step"] = step.to(wanted)
            if isinstance(optimizer, torch.optim.NAdam) and mu_product is not None and not group["capturable"]:
                own = on_cpu.get(param)
                state["mu_product"] = mu_product.to("cpu") if own is None else own


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
    return loaded


def _as_built(live: Any, saved: Any) -> Any:
    if isinstance(saved, torch.Tensor) and isinstance(live, (int, float)) and saved.numel() == 1:
        return saved.item()
    if isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple)) and len(saved) == len(live):
        return type(live)(_as_built(a, b) for a, b in zip(live, saved, strict=True))
    if isinstance(live, torch.Tensor):
        return torch.as_tensor(saved, dtype=live.dtype, device=live.device)
    return saved
