"""The state of every random generator that training draws from: Python, NumPy, torch on the CPU and on accelerators."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from latentcache.devices.placement import current_accelerator

logger = logging.getLogger("latentcache")


def rng_state() -> dict[str, Any]:
    """The global generators' states, as plain data and tensors.

    `accelerator` holds one state per visible device, or is None without any.
    """
    accelerator = current_accelerator()
    return {
        "python": random.getstate(),
        "numpy": tree_map_only(np.ndarray, np.ndarray.tolist, np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "accelerator": None if accelerator is None else {"type": accelerator.type, "states": _states(accelerator)},
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned.

    The streams of accelerators that are not here (another type, fewer devices) are left out with a logged warning:
    another kind of device draws other numbers from the same state.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    saved = state["accelerator"]
    here = current_accelerator()
    if saved is None and here is None:
        return
    if saved is None or here is None or saved["type"] != here.type:
        logger.warning(
            "random state: saved with %s, here is %s; the random stream of the accelerator is not resumed",
            "no accelerator" if saved is None else saved["type"],
            "no accelerator" if here is None else here.type,
        )
        return
    positions = _positions(here)
    if len(positions) != len(saved["states"]):
        logger.warning("random state: saved with %d %s, here are %d", len(saved["states"]), here.type, len(positions))
    for stream, position in zip(saved["states"], positions, strict=False):
        torch.get_device_module(here).set_rng_state(stream, *position)


def _positions(accelerator: torch.device) -> list[tuple[int, ...]]:
    """What names each device's generator. That of mps is the one whose functions take no device."""
    if accelerator.type == "mps":
        return [()]
    return [(index,) for index in range(torch.get_device_module(accelerator).device_count())]


def _states(accelerator: torch.device) -> list[torch.Tensor]:
    return [torch.get_device_module(accelerator).get_rng_state(*position) for position in _positions(accelerator)]
