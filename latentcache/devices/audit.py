"""The audit of devices: every tensor of a training run that is not where, or not what, it is meant to be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import torch

from latentcache.devices.audit_report import AuditReport, Finding, Kind
from latentcache.devices.offload import hooks_by_path, numbered
from latentcache.devices.optimizer_audit import ownership_findings, params_of, state_findings, states_of
from latentcache.devices.part_tensors import Holding, holdings_of, is_optimizer, is_scaler
from latentcache.devices.placement import DeviceLike, device_of
from latentcache.devices.prefix_map import Declared
from latentcache.devices.tensor_location import device_of_values, why_left_alone

CPU, META = torch.device("cpu"), torch.device("meta")


def audit(
    parts: Mapping[str, object],
    *,
    device: DeviceLike | Mapping[str, DeviceLike] | None = None,
    training: Mapping[str, bool] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> AuditReport:
    """Look at every tensor of the named parts, and name each that is not on the device it is meant to be on.

    A part is a module, an optimizer, a GradScaler, an EMA, or a nested batch. `device` is that of all parts, or of
    each by name; a parked part is given its own. Where it is not given it is inferred: the execution device of the
    first module under an offload hook, else the device of most parameters and buffers. `training` and `dtypes` are
    checked where they are declared. In all three a key is a part or a dotted path below one, and the longest wins.

    Nothing is moved. Raises DeviceError for parts of another kind and for keys that name nothing.
    """
    holdings = _holdings(parts)
    states = [state for part, value in parts.items() if is_optimizer(value) for state in states_of(part, value)]
    given = device if isinstance(device, Mapping) else dict.fromkeys(parts, device) if device is not None else {}
    devices = Declared("device", {key: numbered(device_of(requester)) for key, requester in given.items()}, parts)
    flags, kinds = Declared("training", training, parts), Declared("dtypes", dtypes, parts)
    inferred = _inferred([holding for holding in holdings if devices.of(holding.path) is None])

    findings: list[Finding] = []
    left_alone: dict[tuple[str, str], list[str]] = {}
    for holding in holdings:
        reason = why_left_alone(holding.tensor)
        if reason:
            left_alone.setdefault((holding.part, reason), []).append(holding.name or "itself")
            continue
        findings += _misplaced(holding, devices.of(holding.path), inferred)
        findings += _recast(holding, kinds.of(holding.path))
    for part, value in parts.items():
        if isinstance(value, torch.nn.Module):
            findings += _wrong_hook(part, value, devices.of(part))
            findings += _wrong_modes(part, value, flags)
        elif is_scaler(value):
            findings += _wrong_scale(part, value, devices.of(part) or inferred)
    parked = devices if isinstance(device, Mapping) else None
    findings += state_findings(states, holdings, parked)
    findings += ownership_findings(parts, holdings)
    for declared in (devices, flags, kinds):
        declared.check_met()
    meant = ((part, devices.of(part) or inferred) for part in parts)
    return AuditReport(
        findings=tuple(findings),
        notes=tuple(
            f"{part}: {len(names)} left where they are, {reason} (the first is {names[0]})"
            for (part, reason), names in left_alone.items()
        ),
        devices=tuple((part, str(device)) for part, device in meant if device is not None),
        num_tensors=len(holdings) + len(states),
    )


def _holdings(parts: Mapping[str, object]) -> list[Holding]:
    holdings = [holding for part, value in parts.items() for holding in holdings_of(part, value)]
    if not any(isinstance(value, torch.nn.Module) for value in parts.values()):
        # Nobody else holds the parameters of the optimizers, so they are looked at here.
        for part, value in parts.items():
            if is_optimizer(value):
                holdings += [Holding(part, name, "parameter", param) for _, param, name in params_of(value)]
    return holdings


def _inferred(holdings: Iterable[Holding]) -> torch.device | None:
    """The device that undeclared parts are meant to be on. In a tie it is the accelerator."""
    votes: dict[bool, Counter[torch.device]] = {True: Counter(), False: Counter()}
    for holding in holdings:
        if holding.hook is not None:
            return holding.hook.execution_device
        found = device_of_values(holding.tensor)
        if holding.tensor.ndim and found.type != "meta" and not why_left_alone(holding.tensor):
            votes[holding.kind in ("parameter", "buffer")][found] += 1
    counts = votes[True] or votes[False]
    return max(counts, key=lambda device: (counts[device], device != CPU), default=None)


def _misplaced(holding: Holding, declared: torch.device | None, inferred: torch.device | None) -> Iterator[Finding]:
    tensor, hook, found = holding.tensor, holding.hook, device_of_values(holding.tensor)
    wanted, allowed = declared or inferred, {declared or inferred}
    if hook is not None and declared != CPU:
        wanted, allowed = hook.execution_device, {hook.execution_device}
    if hook is not None and hook.moves_weights:
        allowed |= {CPU, META}
    if wanted is None or found in allowed:
        return
    if found == META:
        yield _finding(holding, "meta", str(wanted), "error", "it holds no values: load or initialise it")
    elif found == CPU and tensor.ndim == 0 and holding.kind == "batch":
        return
    elif found == CPU and tensor.ndim == 0 and holding.kind == "buffer":
        yield _finding(holding, str(found), str(wanted), "warning", "a 0-dim CPU tensor is legal in arithmetic only")
    elif holding.kind == "attribute":
        yield _finding(holding, str(found), str(wanted), "warning", "it is no buffer: .to() leaves it behind")
    else:
        yield _finding(holding, str(found), str(wanted), "error")


def _recast(holding: Holding, wanted: torch.dtype | None) -> Iterator[Finding]:
    dtype = holding.tensor.dtype
    if wanted is not None and holding.tensor.is_floating_point() and dtype != wanted and holding.kind != "gradient":
        yield _finding(holding._replace(kind="dtype"), str(dtype), str(wanted), "error")


def _finding(
    holding: Holding, found: str, wanted: str, level: Literal["error", "warning"], reason: str = ""
) -> Finding:
    kind: Kind = "meta" if found == "meta" else holding.kind
    return Finding(holding.part, holding.name, kind, tuple(holding.tensor.shape), found, wanted, level, reason)


def _wrong_hook(part: str, module: torch.nn.Module, declared: torch.device | None) -> Iterator[Finding]:
    """A part under hooks runs where they say, whatever is declared. On the CPU it may be parked under them."""
    path, hook = next(iter(hooks_by_path(module).items()), ("", None))
    if hook is not None and declared not in (None, CPU, hook.execution_device):
        found = str(hook.execution_device)
        yield Finding(part, path, "hook", None, found, str(declared), "error", "its offload hook runs it elsewhere")


def _wrong_modes(part: str, module: torch.nn.Module, flags: Declared[bool]) -> Iterator[Finding]:
    for path, submodule in module.named_modules():
        wanted = flags.of(f"{part}.{path}" if path else part)
        if wanted is not None and submodule.training != wanted:
            modes = {True: "train", False: "eval"}
            yield Finding(part, path, "mode", None, modes[submodule.training], modes[wanted], "error")


def _wrong_scale(part: str, scaler: torch.amp.GradScaler, wanted: torch.device | None) -> Iterator[Finding]:
    """Only the type counts: a GradScaler copies its scale to each device of that type."""
    if wanted is None or not scaler.is_enabled():
        return
    tensors = {name: getattr(scaler, name, None) for name in ("_scale", "_growth_tracker")}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device.type != wanted.type:
            reason = "the scale must be with the loss"
            yield Finding(part, name, "scale", (), str(tensor.device), str(wanted), "error", reason)
    made_for = torch.device(scaler._device).type
    if made_for != wanted.type:
        reason = f"make it with GradScaler({wanted.type!r})"
        yield Finding(part, "", "scale", None, made_for, wanted.type, "error", reason)
