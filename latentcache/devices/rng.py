"""Random state: saves and restores the global generators of Python, NumPy and torch, on the CPU and accelerators."""

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
    """The state of every global generator, as plain data and tensors.

    `accelerator` holds one state per visible device, or is None if there is no accelerator.
    """
    here = current_accelerator()
    states = None if here is None else [torch.get_device_module(here).get_rng_state(*each) for each in _indices(here)]
    return {
        "python": random.getstate(),
        "numpy": tree_map_only(np.ndarray, np.ndarray.tolist, np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "accelerator": None if here is None else {"type": here.type, "states": states},
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned.

    The streams of accelerators that this machine lacks (another type, or fewer devices) are skipped, with a logged
    warning: another type of device would draw other numbers from the same state.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    here = current_accelerator()
    saved = state["accelerator"] or {"type": "no accelerator", "states": []}
    here_type = "no accelerator" if here is None else here.type
    if saved["type"] != here_type:
        message = "random state: saved with %s, loaded with %s; the accelerator's random stream is not restored"
        logger.warning(message, saved["type"], here_type)
        return
    indices = [] if here is None else _indices(here)
    if len(indices) != len(saved["states"]):
        logger.warning("random state: saved with %d %s, loaded with %d", len(saved["states"]), here_type, len(indices))
    for stream, index in zip(saved["states"], indices, strict=False):
        torch.get_device_module(here_type).set_rng_state(stream, *index)


def _indices(accelerator: torch.device) -> list[tuple[int, ...]]:
    """The arguments that select each device's generator; mps has one generator, and its functions take none."""
    if accelerator.type == "mps":
        return [()]
    return [(index,) for index in range(torch.get_device_module(accelerator).device_count())]
