"""The device audit: finds every tensor of a training run whose device, or mode, is not the expected one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch

from latentcache.devices.optimizer import StateTensor, named_params, state_tensors
from latentcache.devices.placement import DeviceLike, device_of
from latentcache.devices.tensor_location import (
    CPU,
    META,
    AuditKind,
    Mover,
    PartTensor,
    device_of_values,
    is_optimizer,
    is_partitioned,
    is_scaler,
    movers,
    part_tensors,
    skip_reason,
    with_index,
)
from latentcache.errors import DeviceError, DeviceMismatchError, listed

T = TypeVar("T")
Level = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One offender. `name` is its dotted name below `part`; `found` and `expected` are devices or modes."""

    part: str
    name: str
    kind: AuditKind
    shape: tuple[int, ...] | None
    found: str
    expected: str
    level: Level
    reason: str = ""

    @property
    def path(self) -> str:
        """Part and name, dotted."""
        return f"{self.part}.{self.name}" if self.name else self.part

    def to_text(self) -> str:
        """One line: the path, the shape, the kind, the value found, the value expected, and the reason."""
        shape = "" if self.shape is None else f" {list(self.shape)}"
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.path}{shape} ({self.kind}) is {self.found}, expected {self.expected}{reason}"


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The findings of one audit, the number of tensors checked, and notes on what was skipped and why."""

    findings: tuple[AuditFinding, ...]
    notes: tuple[str, ...] = ()
    num_tensors: int = 0

    @property
    def errors(self) -> tuple[AuditFinding, ...]:
        """The findings that make a step fail, or train the wrong thing."""
        return tuple(finding for finding in self.findings if finding.level == "error")

    @property
    def ok(self) -> bool:
        """Whether there are no errors; there may be warnings."""
        return not self.errors

    def to_text(self) -> str:
        """One line per finding and note, errors first, and a last line with the counts."""
        lines = [f"error    {finding.to_text()}" for finding in self.errors]
        lines += [f"warning  {finding.to_text()}" for finding in self.findings if finding.level == "warning"]
        lines += [f"note     {note}" for note in self.notes]
        num_warnings = len(self.findings) - len(self.errors)
        lines.append(f"{self.num_tensors} tensors: {len(self.errors)} errors, {num_warnings} warnings")
        return "\n".join(lines)

    def raise_for_errors(self) -> None:
        """Raise a DeviceMismatchError that lists all errors, if there are any; its fields describe the first one."""
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
    """Check every tensor of the named parts, and report each one that is not on the device it should be on.

    Nothing is moved. In `device`, `training` and `managed` a name is a part or a dotted path below one; the longest
    matching name wins.

    Args:
        parts: Modules, optimizers, GradScalers, EMAs and nested batches, by name.
        device: The device of all parts, or one per name, such as the CPU for a parked part. By default it is inferred:
            the execution device of the first module under an offload hook, else that of most parameters and buffers.
        training: Train (True) or eval mode, by name. Modules that are not named are not checked.
        managed: Names whose weights may wait on the CPU, because software that is not recognised moves them in time.
            Offload hooks, block swap and layer offload are recognised.

    Returns:
        The findings, with notes on what was skipped and why.

    Raises:
        DeviceError: A part is of another kind, or a name matches nothing.
    """
    named = _PrefixMap("managed", dict.fromkeys(managed, Mover("what `managed` names", None)), parts)
    tensors = [each._replace(mover=named.get(each.path) or each.mover) for each in _tensors(parts)]
    states = [(part, state) for part, value in parts.items() if is_optimizer(value) for state in state_tensors(value)]
    given = device if isinstance(device, Mapping) else dict.fromkeys(parts, device) if device is not None else {}
    devices = _PrefixMap("device", {key: with_index(device_of(like)) for key, like in given.items()}, parts)
    flags = _PrefixMap("training", training, parts)
    inferred = _inferred([tensor for tensor in tensors if devices.get(tensor.path) is None])
    parameters = {id(item.tensor): item for item in tensors if item.kind == "parameter"}

    findings: list[AuditFinding] = []
    skipped: dict[tuple[str, str], list[str]] = {}
    for item in tensors:
        reason = skip_reason(item.tensor)
        if item.mover is not None and _waits(item, item.mover):
            reason = reason or f"moved by {item.mover.name}"
        if reason:
            skipped.setdefault((item.part, reason), []).append(item.name or "itself")
        else:
            findings += _misplaced(item, devices.get(item.path), inferred)
    for part, value in parts.items():
        if isinstance(value, torch.nn.Module):
            findings += _wrong_hook(part, value, devices.get(part))
            findings += _wrong_modes(part, value, flags)
        elif is_scaler(value):
            findings += _wrong_scale(part, value, devices.get(part) or inferred)
    findings += _misplaced_states(states, parameters, devices if isinstance(device, Mapping) else None)
    findings += _orphans(parts, parameters)
    for declared in (devices, flags, named):
        declared.check_met()
    return AuditReport(
        findings=tuple(findings),
        notes=tuple(
            f"{part}: {len(names)} left where they are, {reason} (the first is {names[0]})"
            for (part, reason), names in skipped.items()
        ),
        num_tensors=len(tensors) + len(states),
    )


def _tensors(parts: Mapping[str, object]) -> list[PartTensor]:
    tensors = [tensor for part, value in parts.items() for tensor in part_tensors(part, value)]
    if not any(isinstance(value, torch.nn.Module) for value in parts.values()):
        # No module brings in the optimizers' parameters, so they are checked under the optimizers' names.
        for part, value in parts.items():
            if is_optimizer(value):
                tensors += [PartTensor(part, name, "parameter", param) for _, param, name in named_params(value)]
    return tensors


def _inferred(tensors: Iterable[PartTensor]) -> torch.device | None:
    """The expected device of these tensors, for which none was declared."""
    votes: dict[bool, Counter[torch.device]] = {True: Counter(), False: Counter()}
    for item in tensors:
        if item.mover is not None:
            if item.mover.device is not None:
                return item.mover.device
            continue
        found = device_of_values(item.tensor)
        if item.tensor.ndim and found.type != "meta" and not skip_reason(item.tensor):
            votes[item.kind in ("parameter", "buffer")][found] += 1
    counts = votes[True] or votes[False]
    # In a tie the accelerator wins: a batch is moved to the model, not the other way round.
    return max(counts, key=lambda device: (counts[device], device != CPU), default=None)


def _misplaced(
    item: PartTensor, declared: torch.device | None, inferred: torch.device | None
) -> Iterator[AuditFinding]:
    found, expected = device_of_values(item.tensor), declared or inferred
    if item.mover is not None and declared != CPU:  # it may be parked under its hooks
        expected = item.mover.device or expected
    if expected is None or found == expected:
        return
    is_number = found == CPU and item.tensor.ndim == 0
    if is_number and item.kind == "batch":
        return
    level: Level = "error"
    reason = ""
    if found == META:
        reason = "it holds no values: load or initialise it"
    elif is_number and item.kind == "buffer":
        level, reason = "warning", "a 0-dim CPU tensor is legal in arithmetic only"
    elif item.kind == "attribute":
        level, reason = "warning", "it is not registered as a buffer, so .to() does not move it"
    yield _finding(item, "meta" if found == META else item.kind, str(found), str(expected), level, reason)


def _finding(item: PartTensor, kind: AuditKind, found: str, expected: str, level: Level, reason: str) -> AuditFinding:
    return AuditFinding(item.part, item.name, kind, tuple(item.tensor.shape), found, expected, level, reason)


def _waits(item: PartTensor, mover: Mover) -> bool:
    """Whether the tensor waits where its mover keeps it. Hooks that move inputs too may leave weights on meta."""
    found = device_of_values(item.tensor)
    return mover.moves_weights and (found == CPU or (found == META and mover.moves_inputs))


def _wrong_hook(part: str, module: torch.nn.Module, declared: torch.device | None) -> Iterator[AuditFinding]:
    """A part that is moved runs on its mover's device, whatever is declared. One finding for its outermost mover."""
    path, mover = next(iter(movers(module).items()), ("", None))
    if mover is not None and mover.device and declared not in (None, CPU, mover.device):
        reason = f"{mover.name} runs it there"
        yield AuditFinding(part, path, "hook", None, str(mover.device), str(declared), "error", reason)


def _wrong_modes(part: str, module: torch.nn.Module, flags: _PrefixMap[bool]) -> Iterator[AuditFinding]:
    modes = {True: "train", False: "eval"}
    for path, submodule in module.named_modules():
        expected = flags.get(f"{part}.{path}" if path else part)
        if expected is not None and submodule.training != expected:
            yield AuditFinding(part, path, "mode", None, modes[submodule.training], modes[expected], "error")


def _wrong_scale(part: str, scaler: torch.amp.GradScaler, expected: torch.device | None) -> Iterator[AuditFinding]:
    """Only the device type matters: a GradScaler copies its scale to each device of that type."""
    if expected is None or not scaler.is_enabled():
        return
    devices = {"": torch.device(scaler._device)}
    for name in ("_scale", "_growth_tracker"):
        if (tensor := getattr(scaler, name)) is not None:
            devices[name] = tensor.device
    for name, found in devices.items():
        if found.type != expected.type:
            reason = f"its scale must be on the loss's device: build it with GradScaler({expected.type!r})"
            yield AuditFinding(part, name, "scale", None, str(found), str(expected), "error", reason)


def _misplaced_states(
    states: Iterable[tuple[str, StateTensor]],
    parameters: Mapping[int, PartTensor],
    declared: _PrefixMap[torch.device] | None,
) -> Iterator[AuditFinding]:
    """State that breaks the rules in `optimizer.py`. An optimizer with a device of its own in `declared` is parked."""
    for part, state in states:
        owner = parameters.get(id(state.param))
        path = f"{owner.path if owner else state.param_name}.{state.name}"
        expected, level, reason = state.rule
        parked = declared.get(f"{part}.{path}") if declared is not None else None
        if parked is not None and expected is not None and state.value.ndim:
            expected, level, reason = parked, "error", "the optimizer is declared to be parked there"
        found = device_of_values(state.value)
        if expected is not None and found != expected:
            shape = tuple(state.value.shape)
            yield AuditFinding(part, path, "optimizer state", shape, str(found), str(expected), level, reason)


def _orphans(parts: Mapping[str, Any], parameters: Mapping[int, PartTensor]) -> Iterator[AuditFinding]:
    """Stepped parameters that are in no module, and trainable parameters of a stepped module that are not stepped."""
    modules = [part for part, value in parts.items() if isinstance(value, torch.nn.Module)]
    optimizers = {part: value for part, value in parts.items() if is_optimizer(value)}
    # DeepSpeed's engines step fp32 copies of their own, which are in no module.
    keeps_copies = any(not isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers.values())
    if not modules or keeps_copies or any(is_partitioned(item.tensor) for item in parameters.values()):
        return
    stepped: set[int] = set()
    trained_by: dict[str, str] = {}
    for part, optimizer in optimizers.items():
        for _, param, param_name in named_params(optimizer):
            stepped.add(id(param))
            if id(param) in parameters:
                trained_by.setdefault(parameters[id(param)].part, part)
                continue
            reason = "no module has it: it was replaced after the optimizer was built, so training it has no effect"
            found, expected = f"an orphan on {device_of_values(param)}", f"a parameter of {' or '.join(modules)}"
            yield AuditFinding(part, param_name, "orphan", tuple(param.shape), found, expected, "error", reason)
    for item in parameters.values():
        if item.tensor.requires_grad and id(item.tensor) not in stepped and item.part in trained_by:
            expected, reason = f"a parameter of {trained_by[item.part]}", "it requires grad but is never stepped"
            yield _finding(item, "orphan", "in no optimizer", expected, "warning", reason)


class _PrefixMap(Generic[T]):
    """Values by dotted prefix; the longest match wins: `unet` covers the whole part, `unet.mid_block` that block.

    `name` is the caller's argument, for messages. Raises DeviceError for a key that is not below any of `parts`.
    """

    def __init__(self, name: str, values: Mapping[str, T] | None, parts: Iterable[str]):
        self._name, self._values = name, dict(values or {})
        self._unmet = {key for key in self._values if key not in parts}
        for key in self._unmet:
            if not any(key.startswith(f"{part}.") for part in parts):
                raise DeviceError(f"{name}[{key!r}]: there is no such part; the parts are {', '.join(parts)}")

    def get(self, path: str) -> T | None:
        """The value of the longest key that equals `path` or is a parent of it, or None."""
        keys = [key for key in self._values if path == key or path.startswith(f"{key}.")]
        self._unmet.difference_update(keys)
        return self._values[max(keys, key=len)] if keys else None

    def check_met(self) -> None:
        """Raise DeviceError for keys that matched no path: a misspelt name must not pass unnoticed."""
        if self._unmet:
            raise DeviceError(f"{self._name}: nothing in the parts is called {', '.join(sorted(self._unmet))}")
