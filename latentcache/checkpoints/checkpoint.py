"""Training checkpoints in one file: model, optimizer, GradScaler, scheduler, EMA, random state, epoch and step.

The caller's objects decide where and how things run: each part is loaded onto the device it is on now, and the
optimizer keeps its flags (fused, foreach, capturable, maximize, differentiable). The file decides the values: weights,
moments, lr, betas, weight decay, counters. A resumed run is bit-identical to an uninterrupted one.

The file is written by `torch.save`, holds only tensors and plain data, and is read with `weights_only`. It is written
as a sibling, synced and renamed. Before anything is loaded, the archive's CRCs are checked and every part is compared
with the file. Checkpoints of other programs are imported without executing code from the file.
"""

from __future__ import annotations

import operator
import os
import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from latentcache.checkpoints.parts import (
    Modules,
    PlainData,
    differences,
    load_module_state,
    module_differences,
    module_state,
    optimizer_differences,
    optimizer_state,
    partitions,
)
from latentcache.devices.optimizer import inner_optimizer, load_optimizer_state
from latentcache.devices.rng import rng_state, set_rng_state
from latentcache.devices.tensor_location import stored_by
from latentcache.errors import CheckpointError, StoreError
from latentcache.provenance import now, software_versions
from latentcache.utils.durable_files import expanded, make_folder, sealed_file, sweep_temporaries

CHECKPOINT_FORMAT = 3
_MARK = "latentcache checkpoint"
"""The first key in the file; its value is the format."""

_USUAL_NAMES = {
    "model": ("model", "state_dict", "model_state_dict", "module", "unet", "net"),
    "optimizer": ("optimizer", "optimizer_state_dict", "optimizer_states", "optim"),
    "ema": ("ema", "ema_state_dict", "model_ema", "ema_model"),
    "epoch": ("epoch",),
    "step": ("step", "global_step", "iteration"),
}
"""Names that plain torch, timm, DeepSpeed (module) and Lightning (state_dict, optimizer_states, global_step) use."""

_NOT_ALLOWED = re.compile(r"GLOBAL (\S+) was not an allowed global")
_PROBLEM = re.compile(r"WeightsUnpickler error: (.*)")


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """What a checkpoint stores besides the parts. Tensors in `extra` are on the CPU."""

    epoch: int
    step: int
    extra: Any


def save_checkpoint(  # noqa: PLR0913  # one keyword for each part of a run; most calls use two or three
    path: str | Path,
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
    """Write the state of a training run to one file.

    Args:
        path: The file, e.g. `run/last.pt`. An existing file is replaced atomically. With several processes each writes
            its own file, because random state differs between them.
        model: One module, or several by name.
        optimizer: An optimizer over parameters of `model`. Parameters are saved under the names they have there.
        scaler: A GradScaler.
        scheduler: An object with `state_dict`.
        ema: A module, or an EMA with `shadow_params` such as diffusers' EMAModel.
        rng: Whether to save the state of the global random generators.
        epoch: Returned by `load_checkpoint`.
        step: Returned by `load_checkpoint`.
        extra: Plain data and tensors of your own, returned by `load_checkpoint`.

    Returns:
        The file's path.

    Raises:
        CheckpointError: Something cannot be written, and each offender is listed: sharded tensors, objects that are
            not plain data, optimizer parameters that are not in `model`, an EMA whose weights are swapped into the
            model. Or a phase of the model is open, or the disk is full. An earlier file is left unchanged.
    """
    path = expanded(path)
    try:
        counters = {"epoch": operator.index(epoch), "step": operator.index(step)}
    except TypeError as error:
        raise CheckpointError(path, f"epoch is {epoch!r} and step {step!r}: both must be whole numbers") from error
    parts: dict[str, Any] = {"model": module_state(model), "extra": extra}
    orphans: list[str] = []
    if optimizer is not None:
        parts["optimizer"], orphans = optimizer_state(optimizer, model)
    if ema is not None:
        parts["ema"] = _ema_state(ema)
    if scaler is not None:
        parts["scaler"] = scaler.state_dict()
    if scheduler is not None:
        parts["scheduler"] = scheduler.state_dict()
    if rng:
        parts["rng"] = rng_state()
    plain = PlainData()
    content = {
        _MARK: CHECKPOINT_FORMAT,
        "saved_at": now(),
        "software": dict(software_versions()),
        **counters,
        "classes": _classes(optimizer=optimizer, scaler=scaler, scheduler=scheduler, ema=ema),
        "parts": {part: plain.of(value, part) for part, value in parts.items()},
    }
    offenders = (*orphans, *partitions(model), *plain.offenders)
    if offenders:
        raise CheckpointError(path, "these cannot be written:", offenders=offenders)
    _write(path, content)
    return path


def _write(path: Path, content: Mapping[str, Any]) -> None:
    tensors = (leaf for leaf in tree_leaves(content) if isinstance(leaf, torch.Tensor))
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.layout == torch.strided)
    # A program may have switched CRCs off for torch.save; without them damage would go unnoticed.
    had_crc = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        make_folder(path.parent)
        sweep_temporaries(path.parent, of=path.name)
        with sealed_file(path, num_bytes) as fd, os.fdopen(os.dup(fd), "wb") as file:
            torch.save(content, file)
    except (OSError, StoreError, RuntimeError) as error:
        # torch's writer raises a generic RuntimeError while it handles the system's error, which names the cause.
        cause = error.__context__ if type(error) is RuntimeError and error.__context__ is not None else error
        raise CheckpointError(path, f"{num_bytes:,} bytes cannot be written: {cause}. It is unchanged.") from error
    finally:
        torch.serialization.set_crc32_options(had_crc)


def load_checkpoint(
    path: str | Path,
    *,
    model: Modules,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    scheduler: Any = None,
    ema: Any = None,
    rng: bool = True,
) -> CheckpointState:
    """Load what `save_checkpoint` wrote into the given parts, each on the device it is on now.

    Parts of the file that are not requested are ignored. Random streams of accelerators that this machine lacks are
    skipped, with a logged warning.

    Args:
        path: The file.
        model: One module, or several by name, as when it was saved.
        optimizer: An optimizer over the model's parameters, built as when it was saved.
        scaler: A GradScaler.
        scheduler: An object with `state_dict` and `load_state_dict`.
        ema: A module, or an EMA with `shadow_params`, as when it was saved.
        rng: Whether to restore the global random generators.

    Returns:
        Epoch, step and `extra`, with tensors on the CPU.

    Raises:
        CheckpointError: The file is damaged, lacks a requested part, or does not fit: names, shapes, dtypes, tied
            weights, parameter groups or classes differ, and each difference is listed. Or a phase of the model is
            open. Nothing has changed then.
    """
    path = expanded(path)
    content = read_checkpoint(path)
    saved = content["parts"]
    given = {"optimizer": optimizer, "scaler": scaler, "scheduler": scheduler, "ema": ema}
    requested = ["model", "extra", *(part for part, value in given.items() if value is not None), *(["rng"] * rng)]
    missing = [part for part in requested if part not in saved]
    if missing:
        without = ", ".join("rng=False" if part == "rng" else f"{part}=None" for part in missing)
        detail = f"has no {', '.join(missing)}, only {', '.join(sorted(saved))}: load it with {without}"
        raise CheckpointError(path, detail)
    offenders = _mismatches(content["classes"], saved, model, given)
    if offenders:
        detail = "does not fit what it is loaded into; build everything as it was when saved:"
        raise CheckpointError(path, detail, offenders=tuple(offenders))
    load_module_state(model, saved["model"])
    if ema is not None:
        _load_ema(ema, saved["ema"])
    if optimizer is not None:
        load_optimizer_state(optimizer, saved["optimizer"]["state_dict"])
    # After the optimizer: the scheduler's constructor changed its lr.
    if scheduler is not None:
        scheduler.load_state_dict(_copied(saved["scheduler"]))
    if scaler is not None:
        scaler.load_state_dict(saved["scaler"])
    if rng:
        set_rng_state(saved["rng"])
    return CheckpointState(content["epoch"], content["step"], _copied(saved["extra"]))


def is_training_checkpoint(path: str | Path) -> bool:
    """Whether `path` is a file that `save_checkpoint` wrote, whole or damaged."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        head = file.read(256)
    return head.startswith(b"PK") and _MARK.encode() in head


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a `save_checkpoint` file: `parts`, `classes`, `epoch`, `step`. Raises CheckpointError.

    Its tensors are views of the file: they use no memory until they are copied.
    """
    try:
        if not path.is_file():
            raise CheckpointError(path, "is a folder, not a file" if path.is_dir() else "there is no such file")
        if not is_training_checkpoint(path):
            raise CheckpointError(path, "was not written by save_checkpoint; use import_checkpoint to read it")
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error}; use an earlier checkpoint") from error
    # zipfile raises errors of many classes for bad bytes; all of them mean that the file is unusable.
    except (zipfile.BadZipFile, RuntimeError, ValueError, EOFError, NotImplementedError, zlib.error) as error:
        raise CheckpointError(path, f"is damaged: {error}; use an earlier checkpoint") from error
    if damaged is not None:
        raise CheckpointError(path, f"is damaged: the CRC of {damaged} does not match; use an earlier checkpoint")
    content = _read(path, mmap=True)
    if isinstance(content, dict) and content.get(_MARK) == CHECKPOINT_FORMAT:
        return content
    found = content.get(_MARK) if isinstance(content, dict) else None
    raise CheckpointError(path, f"has format {found!r}; this version reads format {CHECKPOINT_FORMAT}")


def _copied(tree: Any) -> Any:
    """The tree with its tensors copied: views would keep the file open."""
    return tree_map_only(torch.Tensor, torch.clone, tree)


def _mismatches(
    classes: Mapping[str, str], saved: Mapping[str, Any], model: Modules, given: Mapping[str, Any]
) -> list[str]:
    found = module_differences(saved["model"], model, "model")
    for part, name in _classes(**given).items():
        if classes.get(part) != name:
            found.append(f"{part}: {classes.get(part)} in the file, {name} here")
    if found:
        return found
    if given["optimizer"] is not None:
        found += optimizer_differences(saved["optimizer"], given["optimizer"], model)
    if given["ema"] is not None:
        found += differences(saved["ema"], _ema_state(given["ema"]), "ema")
    if given["scaler"] is not None and bool(saved["scaler"]) != bool(given["scaler"].state_dict()):
        found.append(f"scaler: enabled={bool(saved['scaler'])} in the file; build it so, or load with scaler=None")
    return found


def _classes(**parts: Any) -> dict[str, str]:
    """The class of each given part; of an optimizer without its wrappers."""
    if parts.get("optimizer") is not None:
        parts["optimizer"] = inner_optimizer(parts["optimizer"])
    kinds = {part: type(value) for part, value in parts.items() if value is not None}
    return {part: f"{kind.__module__}.{kind.__qualname__}" for part, kind in kinds.items()}


def _ema_state(ema: Any) -> dict[str, Any]:
    if isinstance(ema, torch.nn.Module):
        return module_state(ema)
    if not hasattr(ema, "shadow_params"):
        detail = f"is a {type(ema).__name__}: give a module, or an EMA with shadow_params such as diffusers' EMAModel"
        raise CheckpointError("ema", detail)
    if stored_by(ema) is not None:
        detail = "the EMA weights are in the model now: call ema.restore(...) first"
        raise CheckpointError("ema", f"{detail}; if it is torch_ema's, then also set ema.collected_params = None")
    state: dict[str, Any] = ema.state_dict()
    return state


def _load_ema(ema: Any, saved: Mapping[str, Any]) -> None:
    if isinstance(ema, torch.nn.Module):
        load_module_state(ema, saved)
        return
    devices = [average.device for average in ema.shadow_params]
    # load_state_dict copies what it is given. The copies are moved one by one, so that the device never holds two sets.
    ema.load_state_dict(saved)
    for number, device in enumerate(devices):
        ema.shadow_params[number] = ema.shadow_params[number].to(device)


# Import


@dataclass(frozen=True, slots=True)
class ImportedCheckpoint:
    """The content of another program's checkpoint, with tensors on the CPU. Parts that were not found are None."""

    path: Path
    content: Any
    """The whole file, for parts under other names."""

    model: Mapping[str, Any] | None
    optimizer: Mapping[str, Any] | None
    """For `load_optimizer_state`, which keeps the flags of the optimizer it loads into."""

    ema: Mapping[str, Any] | None
    epoch: int | None
    step: int | None


def import_checkpoint(path: str | Path) -> ImportedCheckpoint:
    """Read a `.ckpt`, `.pt`, `.pth` or `.bin` file that another program wrote with `torch.save`, onto the CPU.

    Such a file is a pickle, which can run any code when it is read. It is read with `weights_only`, which accepts
    tensors and plain data and refuses everything else.

    Args:
        path: The file.

    Returns:
        The parts found under common names (`state_dict`, `optimizer_states`, ...), and the whole file as `content` for
        anything else. A flat dict of tensors is taken as a model. Pass `optimizer` to `load_optimizer_state`.

    Raises:
        CheckpointError: The file would need code to be run, or is damaged.
    """
    path = expanded(path)
    content = _read(path)
    parts = {part: _usual(content, part) for part in _USUAL_NAMES}
    is_flat = isinstance(content, Mapping) and content and all(isinstance(v, torch.Tensor) for v in content.values())
    if parts["model"] is None and is_flat:
        parts["model"] = content
    return ImportedCheckpoint(path, content, **parts)


def _read(path: Path, *, mmap: bool = False) -> Any:
    if path.suffix == ".safetensors":
        raise CheckpointError(path, "is not a torch.save file; read it with safetensors.torch.load_file")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error}") from error
    # torch's reader raises errors of many classes for bad bytes; all of them mean that the file is unusable.
    except Exception as error:
        needed = _code_needed(path) or _NOT_ALLOWED.findall(str(error))
        if not needed:
            # The rest of torch's message advises loading without weights_only.
            problem = _PROBLEM.search(str(error))
            detail = problem[1] if problem else f"{type(error).__name__}: {error}".partition("\n")[0]
            raise CheckpointError(path, f"is damaged, or not written by torch.save: {detail}") from error
        raise CheckpointError(
            path,
            "needs code to be run to read it, so it is refused: such code can do anything. If you trust the author, "
            "load it with the program that wrote it and save only the state_dicts (tensors and plain data), or allow "
            "these names around this call with torch.serialization.safe_globals:",
            offenders=tuple(needed),
        ) from error


def _code_needed(path: Path) -> list[str]:
    """The globals that the pickle needs besides tensors and plain data; empty if it cannot be parsed."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # the file is damaged, or of the format before torch 1.6
        return []


def _usual(content: Any, part: str) -> Any:
    if not isinstance(content, Mapping):
        return None
    for name in _USUAL_NAMES[part]:
        value = content.get(name)
        # Lightning stores lists, one item per optimizer; several are ambiguous.
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, int if part in ("epoch", "step") else Mapping):
            return value
    return None
