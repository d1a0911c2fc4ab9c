"""Checkpoints of a training run: model, optimizer, GradScaler, scheduler, EMA, random state, epoch and step, no pickle.

What the caller built decides where and how things run: each part is loaded onto the device that it is on now, and the
optimizer keeps its flags (fused, foreach, capturable, maximize, differentiable). The file decides the values: weights,
moments, lr, betas, weight decay, counters. A resumed run is bit-identical to one that was not interrupted.

Everything is compared before anything is loaded: a checkpoint that does not fit changes nothing.
Checkpoints of other programs are imported without running what they contain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from latentcache.checkpoints.folder import read_document, read_tensors, write_checkpoint
from latentcache.checkpoints.parts import (
    Modules,
    load_module_state,
    load_named_optimizer_state,
    module_differences,
    module_state,
    optimizer_differences,
    optimizer_state,
    partitions,
)
from latentcache.checkpoints.state_codec import TreeWriter, devices_of, differences, move_items, to_devices, unpack
from latentcache.devices.optimizer import inner_optimizer
from latentcache.devices.rng import rng_state, set_rng_state
from latentcache.devices.tensor_location import is_swapped_in
from latentcache.errors import CheckpointError
from latentcache.provenance import now, software_versions

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
class CheckpointState:
    """What a checkpoint stores next to the parts that were loaded. Tensors in `extra` are on the CPU."""

    epoch: int
    step: int
    extra: Any


def save_checkpoint(  # noqa: PLR0913  # each is one part of a run, by keyword, and most calls name two or three
    folder: str | Path,
    *,
    model: Modules,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    scheduler: Any = None,
    ema: Any = None,
    rng: bool = True,
    epoch: int = 0,
    step: int = 0,
    extra: Any = None,
) -> Path:
    """Write the run's state into `folder`, and return the folder's path.

    `model` is one module or several by name; `ema` a module, or an object with `state_dict`. `extra` is plain data and
    tensors. A checkpoint in `folder` is replaced, without a moment in which there is none. One process writes a folder:
    random state is that process's. Raises CheckpointError, with every offender, for what cannot be written:
    sharded and quantised tensors, objects that are not plain data, optimizer parameters that `model` does not have, an
    EMA that is swapped in. The folder is then as it was.
    """
    folder = Path(folder)
    parts: dict[str, Any] = {"model": module_state(model), "extra": extra}
    orphans: list[str] = []
    if optimizer is not None:
        parts["optimizer"], orphans = optimizer_state(optimizer, model)
    if ema is not None:
        if is_swapped_in(ema):
            detail = "the EMA weights are in the model now, and would be saved as its own; call ema.restore(...) first"
            raise CheckpointError(folder, detail)
        parts["ema"] = module_state(ema) if isinstance(ema, torch.nn.Module) else ema.state_dict()
    if scaler is not None:
        parts["scaler"] = scaler.state_dict()
    if scheduler is not None:
        parts["scheduler"] = scheduler.state_dict()
    if rng:
        parts["rng"] = rng_state()
    if orphans:
        detail = "the optimizer has parameters that no module of `model` has; name all trained modules: "
        raise CheckpointError(folder, detail + "model={'unet': unet, ...}", offenders=tuple(orphans))
    writers = {part: TreeWriter(part) for part in parts}
    trees = {part: writers[part].pack(value) for part, value in parts.items()}
    offenders = (*partitions(model), *(line for writer in writers.values() for line in writer.offenders))
    if offenders:
        raise CheckpointError(folder, "these cannot be written:", offenders=offenders)
    document = {
        "saved_at": now(),
        "software": dict(software_versions()),
        "epoch": epoch,
        "step": step,
        "classes": _classes(optimizer=optimizer, scaler=scaler, scheduler=scheduler, ema=ema),
        "parts": trees,
    }
    write_checkpoint(folder, document, {part: writer.tensors for part, writer in writers.items()})
    return folder


def load_checkpoint(
    folder: str | Path,
    *,
    model: Modules,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    scheduler: Any = None,
    ema: Any = None,
    rng: bool = True,
) -> CheckpointState:
    """Load what `save_checkpoint` wrote into the parts given, each on the device that it is on now.

    Parts of the file that are not requested are not read. Random streams of accelerators that are not here are not
    loaded, with a logged warning. Raises CheckpointError if the files are damaged, if a requested part is not in the
    file, or if names, shapes, dtypes, tied weights, parameter groups or classes differ; it names each. Nothing has
    changed then.
    """
    folder = Path(folder)
    document = read_document(folder)
    given = {"optimizer": optimizer, "scaler": scaler, "scheduler": scheduler, "ema": ema}
    requested = ["model", "extra", *(part for part, value in given.items() if value is not None), *(["rng"] * rng)]
    missing = [part for part in requested if part not in document["parts"]]
    if missing:
        have = ", ".join(sorted(document["parts"]))
        detail = f"has no {', '.join(missing)}, it has {have}; leave out what it lacks ({missing[0]}=...)"
        raise CheckpointError(folder, detail)
    saved = {part: _read_part(folder, document, part) for part in requested}
    offenders = _mismatches(document, saved, model, given)
    if offenders:
        detail = "does not fit what it is loaded into; build it as it was when saved:"
        raise CheckpointError(folder, detail, offenders=tuple(offenders))
    load_module_state(model, saved["model"])
    if ema is not None:
        _load_ema(ema, saved["ema"])
    if optimizer is not None:
        load_named_optimizer_state(optimizer, saved["optimizer"], model)
    # After the optimizer: a scheduler's constructor has changed its lr.
    if scheduler is not None:
        scheduler.load_state_dict(to_devices(saved["scheduler"], devices_of(scheduler.state_dict())))
    if scaler is not None:
        scaler.load_state_dict(saved["scaler"])
    if rng:
        set_rng_state(saved["rng"])
    return CheckpointState(document["epoch"], document["step"], saved["extra"])


def _read_part(folder: Path, document: Mapping[str, Any], part: str) -> Any:
    try:
        return unpack(document["parts"][part], read_tensors(folder, document, part))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(folder, f"{part} is not what latentcache writes: {error!r}") from error


def _mismatches(
    document: Mapping[str, Any], saved: Mapping[str, Any], model: Modules, given: Mapping[str, Any]
) -> list[str]:
    found = module_differences(saved["model"], model, "model")
    for part, name in _classes(**given).items():
        if document["classes"].get(part) != name:
            found.append(f"{part}: saved from {document['classes'].get(part)}, here is {name}")
    if found:
        return found
    if given["optimizer"] is not None:
        found += optimizer_differences(saved["optimizer"], given["optimizer"], model)
    if isinstance(given["ema"], torch.nn.Module):
        found += module_differences(saved["ema"], given["ema"], "ema")
    elif given["ema"] is not None:
        found += differences(saved["ema"], given["ema"].state_dict(), "ema")
    if given["scaler"] is not None and bool(saved["scaler"]) != bool(given["scaler"].state_dict()):
        found.append(f"scaler: enabled={bool(saved['scaler'])} in the file; build it so, or leave scaler=None")
    return found


def _classes(**parts: Any) -> dict[str, str]:
    """The class of each part that is given; an optimizer's without its wrappers."""
    if parts.get("optimizer") is not None:
        parts["optimizer"] = inner_optimizer(parts["optimizer"])
    kinds = {part: type(value) for part, value in parts.items() if value is not None}
    return {part: f"{kind.__module__}.{kind.__qualname__}" for part, kind in kinds.items()}


def _load_ema(ema: Any, saved: Mapping[str, Any]) -> None:
    if isinstance(ema, torch.nn.Module):
        load_module_state(ema, saved)
        return
    devices = devices_of(ema.state_dict())
    # Such classes copy what they are given. The copies are moved one by one, so that the device never has a second set.
    ema.load_state_dict(saved)
    move_items(ema.state_dict(), devices)
    if devices_of(ema.state_dict()) != devices:
        # Its state_dict does not return its own lists.
        ema.load_state_dict(to_devices(saved, devices))


# Import


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
    """Read a `.ckpt`, `.pt`, `.pth` or `.bin` file that another program wrote with `torch.save`, onto the CPU.

    Such a file is a pickle, and unpickling runs the code that the file names. torch's restricted reader makes tensors
    and plain data, and refuses the rest. No other reader is used.

    Args:
        path: The file.
        names: Dotted paths of parts in it, which override the names in use (`state_dict`, `optimizer_states`, ...):
            `{"model": "trainer.var_wo_ddp"}`. A file that is a flat dict of tensors is a model.

    Returns:
        The parts that were found. Give `optimizer` to `load_optimizer_state`.

    Raises:
        CheckpointError: The file needs code, is damaged, or has nothing under a path of `names`.
    """
    path = Path(path)
    unknown = sorted((names or {}).keys() - _USUAL_NAMES.keys())
    if unknown:
        raise CheckpointError(path, f"names has {unknown}, allowed are {sorted(_USUAL_NAMES)}")
    content = _read(path)
    parts = {part: _usual(content, part) for part in _USUAL_NAMES}
    for part, dotted in (names or {}).items():
        parts[part] = _at(path, content, dotted)
    is_flat = isinstance(content, Mapping) and content and all(isinstance(v, torch.Tensor) for v in content.values())
    if parts["model"] is None and is_flat:
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
