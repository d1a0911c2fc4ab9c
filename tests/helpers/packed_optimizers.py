"""Optimizers that keep state in plain objects, as the 8-bit ones of trainers do: torch moves none of what is inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Packed:
    """Values as int8 codes and one scale: an object of no tensor class, with a tensor inside."""

    def __init__(self, values: torch.Tensor | Mapping[str, Any]):
        if isinstance(values, Mapping):
            self.codes, self.scale = values["codes"], values["scale"]
            return
        self.scale = max(values.abs().max().item(), 1e-12) / 127
        self.codes = (values / self.scale).round().to(torch.int8)

    def values(self) -> torch.Tensor:
        return self.codes.float() * self.scale


class MaskedMomentum(torch.optim.Optimizer):
    """A rate for each element in an object, beside plain state; in a file that object is a dict."""

    def __init__(self, params: Any, lr: float = 0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(momentum=torch.zeros_like(param), rates=Packed(torch.full_like(param, group["lr"])))
                state["momentum"].mul_(0.9).add_(param.grad)
                rates = state["rates"].values() * torch.where(state["momentum"] * param.grad > 0, 1.1, 0.9)
                param.sub_(rates * state["momentum"])
                state["rates"] = Packed(rates)

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        packed = {number: {**state, "rates": vars(state["rates"])} for number, state in found["state"].items()}
        return {**found, "state": packed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        plain = {n: {k: v for k, v in s.items() if k != "rates"} for n, s in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": plain})
        params = [param for group in self.param_groups for param in group["params"]]
        for number, state in state_dict["state"].items():
            self.state[params[number]]["rates"] = Packed(state["rates"])


class PackedMomentum(torch.optim.Optimizer):
    """All state in objects, which are in its state_dict as they are."""

    def __init__(self, params: Any, lr: float = 0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                before = state["momentum"][0].values() * 0.9 if state else 0.0
                momentum = param.grad + before
                param.sub_(group["lr"] * momentum)
                state["momentum"] = [Packed(momentum)]
