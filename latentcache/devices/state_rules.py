"""Where an optimizer's state belongs, by the rules of torch's own optimizers.

The rules follow `torch/optim` of 2.13 ("special device hosting for step" in `optimizer.py`):

    state                          fused or capturable group      other groups
    `step`, 0-dim                  the parameter's device         the CPU; on the device each use is a host sync
    `step` of ASGD, other 0-dim    the parameter's device         the CPU or the parameter's device
    one dimension or more          the parameter's device         the parameter's device

The flags are those of the group now: `load_state_dict` replaces them, so they must be final first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch

from latentcache.devices.tensor_location import device_of_values, why_immovable

CPU = torch.device("cpu")


class StateRule(NamedTuple):
    """Where a state tensor belongs. `device` None: where it is, it may stay. `level` is that of being elsewhere."""

    device: torch.device | None
    level: Literal["error", "warning"]
    reason: str


def wanted_state_device(
    optimizer: Any, group: Mapping[str, Any], param: torch.Tensor, name: str, value: torch.Tensor
) -> StateRule:
    """The rule for `optimizer.state[param][name]`, which is `value`; `group` is the param group of `param`.

    A tensor obeys the rule if the rule's device is None or its own. Wrapped optimizers are looked into.
    """
    home = device_of_values(param)
    immovable = why_immovable(value)
    if immovable:
        return StateRule(None, "error", immovable)
    if home.type == "meta":
        return StateRule(None, "error", "the parameter is on meta, which is no place for state")
    if value.ndim > 0:
        return StateRule(home, "error", "state of one dimension or more belongs on its parameter's device")
    flags = [flag for flag in ("fused", "capturable") if group.get(flag)]
    if flags:
        return StateRule(home, "error", f"{flags[0]}=True: the kernel reads {name} on its parameter's device")
    found = device_of_values(value)
    if found not in (CPU, home):
        return StateRule(
            home if name != "step" else CPU, "error", f"{name} is neither on the CPU nor with its parameter"
        )
    if name == "step" and not isinstance(unwrapped(optimizer), torch.optim.ASGD):
        return StateRule(CPU, "warning", "without fused or capturable, step on a device costs one host sync per use")
    return StateRule(None, "error", f"a 0-dim {name} may lie on the CPU or with its parameter")


def unwrapped(optimizer: Any) -> Any:
    """The innermost optimizer: accelerate and DeepSpeed keep it in `.optimizer`."""
    while hasattr(inner := getattr(optimizer, "optimizer", None), "param_groups"):
        optimizer = inner
    return optimizer
