"""Averaged weights in the place of the trained ones: an EMA's, and those of a schedule-free optimizer.

Both are swapped in and out by their own methods. The trained weights are copied back bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from latentcache.devices.optimizer import unwrapped
from latentcache.devices.part_tensors import is_swapped_in
from latentcache.errors import PhaseError


class EmaWeights:
    """The weights of an EMA with `store`, `copy_to` and `restore`, as diffusers' EMAModel has them.

    A phase that does not swap them in swaps them out at its end if other code left them in. An EMA that does not fit
    is a PhaseError where it is `needed`; elsewhere it is left alone.
    """

    def __init__(self, ema: Any, parameters: Sequence[torch.nn.Parameter], *, needed: bool):
        self._ema = ema
        self._was_in = is_swapped_in(ema)
        self._parameters: list[torch.nn.Parameter] = []
        if not self._was_in and (needed or why_unfit(ema, parameters) is None):
            self._parameters = ema_parameters(ema, parameters)

    def swap_in(self) -> None:
        """Swap the averages in, unless the phase around this one did."""
        if not self._was_in:
            self._ema.store(self._parameters)
            self._ema.copy_to(self._parameters)

    def restore(self) -> None:
        """Swap the averages out, also where other code swapped them in."""
        if self._parameters and is_swapped_in(self._ema):
            self._ema.restore(self._parameters)

    def changes(self) -> Iterator[str]:
        """Whether the averages are in or out, if that differs."""
        if is_swapped_in(self._ema) != self._was_in:
            yield f"ema: its weights are {'in' if is_swapped_in(self._ema) else 'no longer in'} the model"


class ScheduleFreeMode:
    """The mode of a schedule-free optimizer: in `eval` the parameters hold the averaged weights.

    Its own `train()` after `eval()` interpolates back, which rounds. So the parameters are copied back too.
    """

    def __init__(self, optimizer: Any):
        # Of any class: schedulefree's wrapper around other optimizers is no torch.optim.Optimizer.
        self._optimizer = unwrapped(optimizer)
        self._was_training = is_training(self._optimizer)
        self._stored: list[tuple[torch.Tensor, torch.Tensor]] = []

    def swap_in(self) -> None:
        """Put the optimizer into eval mode, unless it is in it already or has no such modes."""
        if self._was_training:
            parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
            self._stored = [(parameter, parameter.detach().to("cpu", copy=True)) for parameter in parameters]
            self._optimizer.eval()

    def restore(self) -> None:
        """Put the optimizer back into its mode, and the parameters to their trained values."""
        if self._was_training and not is_training(self._optimizer):
            self._optimizer.train()
        with torch.no_grad():
            for parameter, values in self._stored:
                parameter.data.copy_(values)

    def changes(self) -> Iterator[str]:
        """The mode, if it differs."""
        if is_training(self._optimizer) != self._was_training:
            yield f"optimizer: is in {'train' if not self._was_training else 'eval'} mode"


def ema_parameters(ema: Any, parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """The parameters that the EMA averages: all of those given, or those that are trained. Raises PhaseError."""
    reason = why_unfit(ema, parameters)
    if reason is not None:
        raise PhaseError(reason, phase="validate")
    if len(ema.shadow_params) == len(parameters):
        return list(parameters)
    return [parameter for parameter in parameters if parameter.requires_grad]


def why_unfit(ema: Any, parameters: Sequence[torch.nn.Parameter]) -> str | None:
    """Why the EMA's weights cannot be put into these parameters, or None."""
    missing = [name for name in ("store", "copy_to", "restore") if not callable(getattr(ema, name, None))]
    missing += [] if hasattr(ema, "shadow_params") else ["shadow_params"]
    if missing:
        return (
            f"the ema is a {type(ema).__name__} without {', '.join(missing)}; use one such as diffusers' EMAModel, or "
            "swap its weights in yourself and leave out ema"
        )
    num_trained = sum(parameter.requires_grad for parameter in parameters)
    num_averaged = len(ema.shadow_params)
    if num_averaged in (len(parameters), num_trained):
        return None
    return (
        f"the ema averages {num_averaged} parameters, but the unet has {len(parameters)}, {num_trained} of them "
        "trained; build it over one of these"
    )


def is_training(optimizer: Any) -> bool:
    """Whether a schedule-free optimizer is in train mode; False for optimizers that have no such mode."""
    # schedulefree's optimizers keep the mode in each group, its wrapper around other optimizers in itself.
    modes = (getattr(optimizer, "train_mode", False), *(group.get("train_mode") for group in optimizer.param_groups))
    return any(modes) and callable(getattr(optimizer, "train", None))
