"""Checkpoints that other programs wrote with `torch.save`: .ckpt, .pt, .pth, .bin. Only this file calls torch.load.

Such a file is a pickle, and unpickling runs the code that the file names. torch's restricted reader makes tensors and
plain data, and refuses the rest. No other reader is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from latentcache.errors import CheckpointError

_USUAL_NAMES = {
    "model": ("model", "state_dict", "model_state_dict", "module", "unet", "net"),
    "optimizer": ("optimizer", "optimizer_state_dict", "optimizer_states", "optim"),
    "scaler": ("scaler", "scaler_state_dict", "grad_scaler", "amp_scaler"),
    "scheduler": ("scheduler", "scheduler_state_dict", "lr_scheduler", "lr_schedulers"),
    "ema": ("ema", "ema_state_dict", "model_ema", "ema_model"),
    "epoch": ("epoch",),
    "step": ("step", "global_step", "iteration"),
}
"""Names in use: plain torch, timm, DeepSpeed (module), Lightning (state_dict, optimizer_states, global_step)."""

_NOT_ALLOWED = re.compile(r"GLOBAL (\S+) was not an allowed global")
_PROBLEM = re.compile(r"WeightsUnpickler error: (.*)")


@dataclass(frozen=True, slots=True)
class ImportedCheckpoint:
    """The content of a foreign checkpoint, all tensors on the CPU. Parts that it does not have are None."""

    path: Path
    content: Any
    """The whole file."""

    model: Mapping[str, Any] | None
    optimizer: Mapping[str, Any] | None
    """Give it to `load_optimizer_state`, which keeps the flags of the optimizer that is there."""

    scaler: Mapping[str, Any] | None
    scheduler: Mapping[str, Any] | None
    ema: Mapping[str, Any] | None
    epoch: int | None
    step: int | None


def import_checkpoint(path: str | Path, *, names: Mapping[str, str] | None = None) -> ImportedCheckpoint:
    """Read a `.ckpt`, `.pt`, `.pth` or `.bin` file onto the CPU, without running anything that it contains.

    Parts are found under the names in use (`state_dict`, `optimizer_states`, ...); a file that is a flat dict of
    tensors is a model. `names` overrides this, with dotted paths: {"model": "trainer.var_wo_ddp"}. Raises
    CheckpointError for files that need code, that are damaged, or that have nothing under a path of `names`.
    """
    path = Path(path)
    unknown = sorted((names or {}).keys() - _USUAL_NAMES.keys())
    if unknown:
        raise CheckpointError(path, f"names has {unknown}, allowed are {sorted(_USUAL_NAMES)}")
    content = _read(path)
    parts = {part: _usual(content, part) for part in _USUAL_NAMES}
    for part, dotted in (names or {}).items():
        parts[part] = _at(path, content, dotted)
    if parts["model"] is None and _is_flat_state(content):
        parts["model"] = content
    return ImportedCheckpoint(path, content, **parts)


def _read(path: Path) -> Any:
    if path.suffix == ".safetensors":
        raise CheckpointError(path, "is no torch.save file; read it with safetensors.torch.load_file")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error}") from error
    # torch's reader raises errors of many classes for bad bytes. With each of them the file cannot be used.
    except Exception as error:
        needed = _code_needed(path) or _NOT_ALLOWED.findall(str(error))
        if not needed:
            # The rest of torch's text advises reading the file without restrictions.
            problem = _PROBLEM.search(str(error))
            detail = problem[1] if problem else f"{type(error).__name__}: {error}".partition("\n")[0]
            raise CheckpointError(path, f"is damaged, or not written by torch.save: {detail}") from error
        raise CheckpointError(
            path,
            "needs code to be run while it is read, so it is refused: a file can make that code do anything. "
            "If you trust its author, load it once with the program that wrote it and save the state_dicts alone "
            "(tensors and plain data), or allow these names around this call with torch.serialization.safe_globals:",
            offenders=tuple(needed),
        ) from error


def _code_needed(path: Path) -> list[str]:
    """The names that the pickle uses beyond tensors and plain data; none if it cannot be parsed."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # the file is damaged, or of the format before torch 1.6
        return []


def _usual(content: Any, part: str) -> Any:
    if not isinstance(content, Mapping):
        return None
    for name in _USUAL_NAMES[part]:
        value = content.get(name)
        # Lightning keeps lists, one item for each optimizer. Of several, none can be chosen.
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, int if part in ("epoch", "step") else Mapping):
            return value
    return None


def _at(path: Path, content: Any, dotted: str) -> Any:
    value = content
    for name in dotted.split("."):
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            have = ", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise CheckpointError(path, f"has no {dotted!r}: {name!r} is not among {have}")
    return value


def _is_flat_state(content: Any) -> bool:
    return isinstance(content, Mapping) and bool(content) and all(isinstance(v, torch.Tensor) for v in content.values())
