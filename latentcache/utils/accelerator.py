"""The accelerator of this machine, asked in a way that torch 2.4 and later have."""

from __future__ import annotations

import torch


def current_accelerator(*, built_for: bool = False) -> torch.device | None:
    """The accelerator of this machine, without a number, or None. `built_for`: that of torch's build, here or not."""
    if not hasattr(torch, "accelerator"):  # before torch 2.6
        found = torch._C._get_accelerator()
        is_here = found.type != "cpu" and (built_for or torch.get_device_module(found).is_available())
        return found if is_here else None
    if not built_for and not torch.accelerator.is_available():
        return None
    try:
        return torch.accelerator.current_accelerator()  # its check_available came with torch 2.7
    except RuntimeError:  # of torch 2.6, built for none
        return None
