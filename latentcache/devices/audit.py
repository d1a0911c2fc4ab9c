"""The audit of devices: every tensor of a training run that is not where, or not what, it is meant to be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch

from latentcache.devices.optimizer import StateTensor, named_params, state_rule, state_tensors
from latentcache.devices.placement import DeviceLike, device_of
from latentcache.devices.tensor_location import (
    CPU,
    META,
    AuditKind,
    Mover,
    PartTensor,
    device_of_most,
    device_of_values,
    hooks_by_path,
    is_optimizer,
    is_partitioned,
    is_scaler,
    part_tensors,
    skip_reason,
    with_index,
)
from latentcache.errors import DeviceError, DeviceMismatchError, listed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One offender. `name` is dotted and starts below `part`; `found` and `expected` are devices or modes."""

    part: str
    name: str
    kind: AuditKind
    shape: tuple[int, ...] | None
    found: str
    expected: str
    level: Literal["error", "warning"]
    reason: str = ""

    @property
    def path(self) -> str:
        """Part and name, dotted."""
        return f"{self.part}.{self.name}" if self.name else self.part

    def to_text(self) -> str:
        """One line: the path, the shape, the kind, what it is, what it should be, and why."""
        shape = "" if self.shape is None else f" {list(self.shape)}"
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.path}{shape} ({self.kind}) is {self.found}, expected {self.expected}{reason}"


@dataclass(frozen=True, slots=True)
class AuditReport:
    """All findings of one audit, the number of tensors that it looked at, and notes on what it left alone and why."""

    findings: tuple[AuditFinding, ...]
    notes: tuple[str, ...] = ()
    num_tensors: int = 0

    @property
    def errors(self) -> tuple[AuditFinding, ...]:
        """The findings that fail a step, or train the wrong thing."""
        return tuple(finding for finding in self.findings if finding.level == "error")

    @property
    def ok(self) -> bool:
        """Whether there is no error; there may be warnings."""
        return not self.errors

    def to_text(self) -> str:
        """A line per finding and note, errors first, and a last line with the counts."""
        lines = [f"error    {finding.to_text()}" for finding in self.errors]
        lines += [f"warning  {finding.to_text()}" for finding in self.findings if finding.level == "warning"]
        lines += [f"note     {note}" for note in self.notes]
        num_warnings = len(self.findings) - len(self.errors)
        lines.append(f"{self.num_tensors} tensors: {len(self.errors)} errors, {num_warnings} warnings")
        return "\n".join(lines)

    def raise_for_errors(self) -> None:
        """DeviceMismatchError that lists the errors, if there are any; its fields are those of the first."""
        if self.ok:
            return
        first = self.errors[0]
        raise DeviceMismatchError(
            f"{len(self.errors)} tensors or flags are not as declared:{listed(e.to_text() for e in self.errors)}",
            module=first.part,
            argument=first.name,
            found=first.found,
            expected=first.expected,
        )


def audit(
    parts: Mapping[str, object],
    *,
    device: DeviceLike | Mapping[str, DeviceLike] | None = None,
    training: Mapping[str, bool] | None = None,
    managed: Iterable[str] = (),
) -> AuditReport:
    """Look at every tensor of the named parts, and name each that is not on the device it is meant to be on.

    A part is a module, an optimizer, a GradScaler, an EMA, or a nested batch. `device` is that of all parts, or of
    each by name; a parked part is given its own. Where it is not given it is inferred: the execution device of the
    first module under an offload hook, else the device of most parameters and buffers. `training` is checked where it
    is declared. In both a key is a part or a dotted path below one, and the longest wins.

    Weights may wait on the CPU where something moves them in time: offload hooks, block swap and layer offload are
    recognised. `managed` names the parts, or paths below, of which the same is true and cannot be seen.

    Nothing is moved. Raises DeviceError for parts of another kind and for keys that name nothing.
    """
    named = _PrefixMap("managed", dict.fromkeys(managed, Mover("what `managed` names", None)), parts)
    tensors = [each._replace(mover=each.mover or named.get(each.path)) for each in _tensors(parts)]
    states = [(part, state) for part, value in parts.items() if is_optimizer(value) for state in state_tensors(value)]
    given = device if isinstance(device, Mapping) else dict.fromkeys(parts, device) if device is not None else {}
    devices = _PrefixMap("device", {key: with_index(device_of(like)) for key, like in given.items()}, parts)
    flags = _PrefixMap("training", training, parts)
    inferred = _inferred([tensor for tensor in tensors if devices.get(tensor.path) is None])

    findings: list[AuditFinding] = []
    left_alone: dict[tuple[str, str], list[str]] = {}
    for item in tensors:
        reason = skip_reason(item.tensor)
        if item.mover is not None and device_of_values(item.tensor) == CPU:
            reason = reason or f"moved by {item.mover.name}"
        if reason:
            left_alone.setdefault((item.part, reason), []).append(item.name or "itself")
            continue
        findings += _misplaced(item, devices.get(item.path), inferred)
    for part, value in parts.items():
        if isinstance(value, torch.nn.Module):
            findings += _wrong_hook(part, value, devices.get(part))
            findings += _wrong_modes(part, value, flags)
        elif is_scaler(value):
            findings += _wrong_scale(part, value, devices.get(part) or inferred)
    findings += _misplaced_states(states, tensors, devices if isinstance(device, Mapping) else None)
    findings += _orphans(parts, tensors)
    for declared in (devices, flags, named):
        declared.check_met()
    return AuditReport(
        findings=tuple(findings),
        notes=tuple(
            f"{part}: {len(names)} left where they are, {reason} (the first is {names[0]})"
            for (part, reason), names in left_alone.items()
        ),
        num_tensors=len(tensors) + len(states),
    )


def _tensors(parts: Mapping[str, object]) -> list[PartTensor]:
    tensors = [tensor for part, value in parts.items() for tensor in part_tensors(part, value)]
    if not any(isinstance(value, torch.nn.Module) for value in parts.values()):
        # No module has the parameters of the optimizers, so they are looked at here.
        for part, value in parts.items():
            if is_optimizer(value):
                tensors += [PartTensor(part, name, "parameter", param) for _, param, name in named_params(value)]
    return tensors


def _inferred(tensors: Iterable[PartTensor]) -> torch.device | None:
    """The device that undeclared parts are meant to be on."""
    votes: dict[bool, Counter[torch.device]] = {True: Counter(), False: Counter()}
    for item in tensors:
        if item.hook is not None:
            return item.hook.execution_device
        if item.mover is not None:
            if item.mover.device is not None:
                return item.mover.device
            continue
        found = device_of_values(item.tensor)
        if item.tensor.ndim and found.type != "meta" and not skip_reason(item.tensor):
            votes[item.kind in ("parameter", "buffer")][found] += 1
    return device_of_most(votes[True] or votes[False])


def _misplaced(
    item: PartTensor, declared: torch.device | None, inferred: torch.device | None
) -> Iterator[AuditFinding]:
    tensor, hook, found = item.tensor, item.hook, device_of_values(item.tensor)
    expected, allowed = declared or inferred, {declared or inferred}
    if hook is not None and declared != CPU:
        expected, allowed = hook.execution_device, {hook.execution_device}
    if hook is not None and hook.moves_weights:
        allowed |= {CPU, META}
    if expected is None or found in allowed:
        return
    if found == META:
        yield _finding(item, "meta", str(expected), "error", "it holds no values: load or initialise it")
    elif found == CPU and tensor.ndim == 0 and item.kind == "batch":
        return
    elif found == CPU and tensor.ndim == 0 and item.kind == "buffer":
        yield _finding(item, str(found), str(expected), "warning", "a 0-dim CPU tensor is legal in arithmetic only")
    elif item.kind == "attribute":
        yield _finding(item, str(found), str(expected), "warning", "it is no buffer: .to() does not move it")
    else:
        yield _finding(item, str(found), str(expected), "error")


def _finding(
    item: PartTensor, found: str, expected: str, level: Literal["error", "warning"], reason: str = ""
) -> AuditFinding:
    kind: AuditKind = "meta" if found == "meta" else item.kind
    return AuditFinding(item.part, item.name, kind, tuple(item.tensor.shape), found, expected, level, reason)


def _wrong_hook(part: str, module: torch.nn.Module, declared: torch.device | None) -> Iterator[AuditFinding]:
    """A part under hooks runs on their device, whatever is declared. On the CPU it may be parked under them."""
    path, hook = next(iter(hooks_by_path(module).items()), ("", None))
    if hook is not None and declared not in (None, CPU, hook.execution_device):
        found = str(hook.execution_device)
        yield AuditFinding(
            part, path, "hook", None, found, str(declared), "error", "its offload hook runs it elsewhere"
        )


def _wrong_modes(part: str, module: torch.nn.Module, flags: _PrefixMap[bool]) -> Iterator[AuditFinding]:
    modes = {True: "train", False: "eval"}
    for path, submodule in module.named_modules():
        expected = flags.get(f"{part}.{path}" if path else part)
        if expected is not None and submodule.training != expected:
            yield AuditFinding(part, path, "mode", None, modes[submodule.training], modes[expected], "error")


def _wrong_scale(part: str, scaler: torch.amp.GradScaler, expected: torch.device | None) -> Iterator[AuditFinding]:
    """Only the type counts: a GradScaler copies its scale to each device of that type."""
    if expected is None or not scaler.is_enabled():
        return
    tensors = {name: getattr(scaler, name, None) for name in ("_scale", "_growth_tracker")}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device.type != expected.type:
            reason = "the scale must be with the loss"
            yield AuditFinding(part, name, "scale", (), str(tensor.device), str(expected), "error", reason)
    built_for = torch.device(scaler._device).type
    if built_for != expected.type:
        reason = f"build it with GradScaler({expected.type!r})"
        yield AuditFinding(part, "", "scale", None, built_for, expected.type, "error", reason)


def _misplaced_states(
    states: Iterable[tuple[str, StateTensor]], tensors: Iterable[PartTensor], declared: _PrefixMap[torch.device] | None
) -> Iterator[AuditFinding]:
    """State that breaks the rules of `optimizer.py`. An optimizer with a declared device is parked there."""
    parameters = _parameters(tensors)
    for part, state in states:
        owner = parameters.get(id(state.param))
        path = f"{owner.path if owner else state.param_name}.{state.name}"
        expected, level, reason = state_rule(state)
        parked = declared.get(f"{part}.{path}") if declared is not None else None
        if parked is not None and expected is not None and state.value.ndim:
            expected, level, reason = parked, "error", "the optimizer is declared to be there"
        found = device_of_values(state.value)
        if expected is not None and found != expected:
            shape = tuple(state.value.shape)
            yield AuditFinding(part, path, "optimizer state", shape, str(found), str(expected), level, reason)


def _orphans(parts: Mapping[str, Any], tensors: Sequence[PartTensor]) -> Iterator[AuditFinding]:
    """Parameters that an optimizer steps but no module has, and those of a module it trains that it does not step."""
    parameters = _parameters(tensors)
    modules = [part for part, value in parts.items() if isinstance(value, torch.nn.Module)]
    optimizers = {part: value for part, value in parts.items() if is_optimizer(value)}
    if not modules or any(_keeps_copies(optimizer, tensors) for optimizer in optimizers.values()):
        return
    stepped: set[int] = set()
    trained_by: dict[str, str] = {}
    for part, optimizer in optimizers.items():
        for _, param, param_name in named_params(optimizer):
            stepped.add(id(param))
            if id(param) in parameters:
                trained_by.setdefault(parameters[id(param)].part, part)
                continue
            reason = "no module has it: it was replaced after the optimizer was built, and training it has no effect"
            found, expected = f"an orphan on {device_of_values(param)}", f"a parameter of {' or '.join(modules)}"
            yield AuditFinding(part, param_name, "orphan", tuple(param.shape), found, expected, "error", reason)
    for item in tensors:
        is_stepped = item.kind != "parameter" or not item.tensor.requires_grad or id(item.tensor) in stepped
        if not is_stepped and item.part in trained_by:
            expected, reason = f"a parameter of {trained_by[item.part]}", "it requires grad and is never stepped"
            yield _finding(item._replace(kind="orphan"), "in no optimizer", expected, "warning", reason)


def _keeps_copies(optimizer: Any, tensors: Iterable[PartTensor]) -> bool:
    """Whether the optimizer steps copies of its own (DeepSpeed's fp32 partitions), which no module has."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return True
    return any(is_partitioned(item.tensor) for item in _parameters(tensors).values())


def _parameters(tensors: Iterable[PartTensor]) -> dict[int, PartTensor]:
    return {id(item.tensor): item for item in tensors if item.kind == "parameter"}


class _PrefixMap(Generic[T]):
    """Values by dotted prefix, the longest wins: `unet` is for all of the part, `unet.mid_block` for that block.

    `name` is the caller's argument, for messages. Raises DeviceError for a key that is below none of `parts`.
    """

    def __init__(self, name: str, values: Mapping[str, T] | None, parts: Iterable[str]):
        self._name, self._values = name, dict(values or {})
        self._unmet = {key for key in self._values if key not in parts}
        for key in self._unmet:
            if not any(key.startswith(f"{part}.") for part in parts):
                raise DeviceError(f"{name}[{key!r}]: there is no such part; the parts are {', '.join(parts)}")

    def get(self, path: str) -> T | None:
        """The value of the longest key that is `path` or lies above it, or None."""
        keys = [key for key in self._values if path == key or path.startswith(f"{key}.")]
        self._unmet.difference_update(keys)
        return self._values[max(keys, key=len)] if keys else None

    def check_met(self) -> None:
        """DeviceError for keys that no looked-up path was below: a misspelt name declares nothing."""
        if self._unmet:
            raise DeviceError(f"{self._name}: nothing in the parts is called {', '.join(sorted(self._unmet))}")
