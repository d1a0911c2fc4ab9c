"""The phase switch: which parts of a model are on the device, in which mode, and training given back as it was."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from latentcache.checkpoints.parts import unwrapped_module
from latentcache.devices.audit import audit
from latentcache.devices.offload import numbered
from latentcache.devices.optimizer import unwrapped
from latentcache.devices.part_tensors import is_optimizer, is_scaler
from latentcache.devices.placement import DeviceLike, device_of
from latentcache.errors import PhaseError
from latentcache.phases.averaged_weights import EmaWeights, ScheduleFreeMode, is_training
from latentcache.phases.interrupts import uninterrupted
from latentcache.phases.module_state import (
    CompiledCalls,
    Hooks,
    Modes,
    RequiresGrad,
    Settings,
    Structure,
    call_eagerly,
)
from latentcache.phases.process_state import Flags, RandomStreams
from latentcache.phases.sharding import (
    GatheredShards,
    check_current,
    check_filled,
    check_trainable,
    is_trained,
    why_left,
    why_rearranged,
)
from latentcache.phases.weights import Casts, Gradients, Values, Weights, named_weights


@dataclass(frozen=True, slots=True)
class Phase:
    """Which parts are on the device, and which of them are in train mode. All other modules are parked, in eval mode.

    `averaged`: an EMA's weights, and those of a schedule-free optimizer's eval mode, stand in for the trained ones.
    """

    on_device: tuple[str, ...]
    training: tuple[str, ...] = ()
    averaged: bool = False


class Phases:
    """Switches the parts of a model between phases.

    `parts` are modules by name (`unet`, `vae`, `text_encoder`, `text_encoder_2`), and what trains them: `optimizer`,
    `scaler`, `ema`. Modules may be wrapped by DistributedDataParallel, `torch.compile` or accelerate: the eager module
    inside is what a phase gives (`module`). `device` is where phases put parts, `park` where they put the others.

    By default the parts that have parameters to train, and the UNet, are on the device in all three phases, in train
    mode only in `train`, and averaged weights stand in outside of it. What other software places is never moved:
    quantised, FSDP and ZeRO-3 parts, parts under offload hooks, and those named in `immovable` (block swapping). The
    averages of an `ema` stay where they are, unless a phase names it in `on_device`: then the others park it.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        *,
        device: DeviceLike,
        park: DeviceLike = "cpu",
        train: Phase | None = None,
        validate: Phase | None = None,
        sample: Phase | None = None,
        immovable: Collection[str] = (),
    ):
        self.parts = dict(parts)
        self.device, self._park = numbered(device_of(device)), numbered(device_of(park))
        self._wrapped = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        self._modules = {name: unwrapped_module(part) for name, part in self._wrapped.items()}
        self._check_distinct()
        needed = tuple(name for name, module in self._modules.items() if name == "unet" or is_trained(module))
        self._phases = {
            "train": train or Phase(needed, tuple(name for name in needed if is_trained(self._modules[name]))),
            "validate": validate or Phase(needed, averaged=True),
            "sample": sample or Phase(needed, averaged=True),
        }
        for name, phase in self._phases.items():
            self._check(name, phase)
        # Averages that no phase wants on the device are moved by nobody.
        places_ema = any("ema" in phase.on_device for phase in self._phases.values())
        self._averages = {"ema": self.parts["ema"]} if places_ema else {}
        unknown = set(immovable) - self._modules.keys()
        if unknown:
            raise PhaseError(f"immovable names {sorted(unknown)}; {self._known()}", phase="train")
        self._immovable = {name: "declared immovable" for name in immovable}
        self._base: tuple[str, Phase] | None = None
        self._frames: list[_Frame] = []
        self._values = Values()

    # What is where

    def module(self, name: str) -> torch.nn.Module:
        """The eager module of a part, without wrappers. PhaseError if there is no such part."""
        if name not in self._modules:
            raise PhaseError(f"there is no part {name!r}; {self._known()}", phase=self.current)
        return self._modules[name]

    def has(self, *names: str) -> bool:
        """Whether all these modules are among the parts."""
        return self._modules.keys() >= set(names)

    @property
    def current(self) -> str:
        """The name of the innermost phase."""
        return self._frames[-1].name if self._frames else self._base[0] if self._base else "none"

    def on_device(self) -> frozenset[str]:
        """The parts that have a tensor on the device now, whoever put it there."""
        return frozenset(
            name
            for name, part in (self._modules | self._averages).items()
            if any(tensor.device == self.device for _, tensor in named_weights(part))
        )

    def not_moved(self) -> dict[str, str]:
        """The parts that phases leave where they are, with the reason."""
        reasons = {name: self.why_not_moved(name) for name in self._modules}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def why_not_moved(self, name: str) -> str | None:
        """Why phases leave a part where it is, or None if they move it."""
        if name in self._immovable:
            return self._immovable[name]
        return why_left(self._modules[name])

    # The switch

    def start(self, name: str = "train") -> None:
        """Begin a phase that nothing leaves, such as the training itself: place the parts and set their modes.

        DeviceMismatchError if the audit finds a tensor elsewhere; PhaseError if a part cannot be trained as it is.
        """
        if self._frames:
            raise PhaseError("start is for the phase outside of all others; leave this one first", phase=self.current)
        phase = self._phase(name)
        self._base = (name, phase)
        self._check_ready(name, phase)
        weights = self._weights()
        self._apply(phase, weights)
        self._audit(phase, weights)

    @contextmanager
    def enter(self, phase: str | Phase) -> Iterator[Phases]:
        """Apply a phase, without gradients; put everything back at the end, whatever ends it.

        Put back are, by object: the training flag of every submodule, requires_grad, device, dtype and memory of every
        parameter and buffer, structure, hooks, plain settings (LoRA scale and adapters, checkpointing, tiling), random
        streams, torch's global flags, EMA weights and the mode of a schedule-free optimizer. Gradients, the GradScaler
        and schedulers are not touched. Ctrl-C waits while state is put back. Phases nest. Parts of FSDP, ZeRO-3 and
        offload hooks keep their own tensors, structure, hooks and settings; declared immovable ones their own tensors,
        structure and hooks.

        Raises DeviceMismatchError when the audit at the beginning finds a tensor elsewhere, and PhaseError for what
        cannot be entered, or could not be put back; the rest is put back all the same.
        """
        name, phase = (phase, self._phase(phase)) if isinstance(phase, str) else ("custom", phase)
        self._check(name, phase)
        frame = None
        try:
            try:
                with uninterrupted():
                    frame = self._open(name, phase)
                with torch.no_grad():
                    yield self
            finally:
                with uninterrupted():
                    self._close(frame)
        finally:
            # Still open if Ctrl-C came on the way into the block above, before it was held back.
            if frame in self._frames:
                with uninterrupted():
                    self._close(frame)

    @contextmanager
    def lend(self, *names: str) -> Iterator[None]:
        """These parts are on the device too, in eval mode: to decode images, or encode a prompt. Then they go home."""
        for name in names:
            self.module(name)
        now = self._phase_now()
        wanted = replace(now, on_device=tuple(dict.fromkeys((*now.on_device, *names))))
        with self.enter(wanted):
            yield

    def place(self) -> None:
        """Declare the placement of the current phase again: call it after whatever may have moved parts away."""
        if self._frames:
            frame = self._frames[-1]
            frame.structure.restore()
            weights = frame.weights
            self._apply(frame.phase, weights)
        else:
            weights = self._weights()
            self._apply(self._phase_now(), weights, modes=False)
        self._audit(self._phase_now(), weights)

    # Inside

    def _open(self, name: str, phase: Phase) -> _Frame:
        self._check_ready(name, phase)
        # Kept only when the phase is open: what a refused one held would be put back in a later one, however old.
        values = self._values if self._frames else Values()
        frame = _Frame(self, name, phase, Weights(self._movable(), values, self._park, outermost=not self._frames))
        self._values = values
        self._frames.append(frame)
        try:
            self._apply(phase, frame.weights)
            for standin in frame.standins if phase.averaged else ():
                standin.swap_in()
            self._audit(phase, frame.weights)
        except BaseException:
            self._close(frame)
            raise
        return frame

    def _close(self, frame: _Frame | None) -> None:
        if frame is None:
            return  # it was not opened
        replaced = [name for name in frame.structure.replaced_parameters() if name in frame.trained]
        failures = frame.restore()
        self._frames.remove(frame)
        if not self._frames:
            self._values = Values()  # nothing is held while no phase is open
        if replaced:
            failures.append(
                f"{len(replaced)} trained Parameters were replaced, the first is {replaced[0]}: "
                "enable_sequential_cpu_offload and align_module_device do that, and an optimizer would go on to train "
                "the old objects. They are put back. Use enable_model_cpu_offload on a part that is not trained, or "
                "Phases.lend"
            )
        failures += frame.changes()
        weights = frame.weights
        wanted = {part: device for part in weights.parts if (device := weights.device_of(part)) is not None}
        failures += [finding.to_text() for finding in self._findings(wanted)]
        if failures:
            raise PhaseError("not everything could be put back as it was:", phase=frame.name, offenders=tuple(failures))

    def _apply(self, phase: Phase, weights: Weights, *, modes: bool = True) -> None:
        """Parked parts go first: they make room."""
        for name in weights.parts:
            if name not in phase.on_device:
                weights.place(name, self._park)
        for name in weights.parts:
            if name in phase.on_device:
                weights.place(name, self.device)
        if modes:
            for name, module in self._modules.items():
                module.train(name in phase.training)
            if not phase.training:
                # A compiled module would be compiled once more for each shape of validation.
                call_eagerly(self._modules)

    def _audit(self, phase: Phase, weights: Weights) -> None:
        wanted = {name: self.device if name in phase.on_device else self._park for name in weights.parts}
        modules = wanted.keys() & self._modules.keys()
        training = {name: name in phase.training for name in modules} if self._frames or not phase.training else {}
        report = audit(self._audited(wanted), device=wanted, training=training)
        report.raise_for_errors()

    def _findings(self, wanted: Mapping[str, torch.device]) -> Any:
        return audit(self._audited(wanted), device=wanted).errors if wanted else ()

    def _audited(self, wanted: Mapping[str, torch.device]) -> dict[str, Any]:
        """The modules that phases move, and what trains them where all trained parts are where training has them."""
        audited: dict[str, Any] = {name: (self._modules | self._averages)[name] for name in wanted}
        trained = [name for name, module in self._modules.items() if is_trained(module)]
        if trained and all(wanted.get(name) == self.device for name in trained):
            audited |= {name: part for name, part in self.parts.items() if is_optimizer(part) or is_scaler(part)}
        return audited

    def _movable(self) -> dict[str, Any]:
        modules = {name: module for name, module in self._modules.items() if self.why_not_moved(name) is None}
        return modules | self._averages

    def _weights(self) -> Weights:
        return Weights(self._movable(), Values(), self._park)

    def _phase(self, name: str) -> Phase:
        if name not in self._phases:
            raise PhaseError(f"is unknown; there are {', '.join(self._phases)}", phase=name)
        return self._phases[name]

    def _phase_now(self) -> Phase:
        if self._frames:
            return self._frames[-1].phase
        return self._base[1] if self._base else self._phases["train"]

    def _check_distinct(self) -> None:
        names: dict[int, str] = {}
        for name, module in self._modules.items():
            other = names.setdefault(id(module), name)
            if other != name:
                raise PhaseError(f"{other} and {name} are one module: give it under one name", phase="none")

    def _check(self, name: str, phase: Phase) -> None:
        known = self._modules.keys() | ({"ema"} if hasattr(self.parts.get("ema"), "shadow_params") else set())
        unknown = ({*phase.on_device} - known) | ({*phase.training} - self._modules.keys())
        if unknown:
            raise PhaseError(f"names {', '.join(sorted(unknown))}; {self._known()}", phase=name)
        parked = set(phase.training) - set(phase.on_device)
        if parked:
            raise PhaseError(f"trains {', '.join(sorted(parked))}, which it parks: add it to on_device", phase=name)

    def _check_ready(self, name: str, phase: Phase) -> None:
        check_trainable(name, self._modules)
        placed = [part for part in phase.on_device if part in self._modules and part not in self._immovable]
        check_filled(name, {part: self._modules[part] for part in placed})
        averages = self.parts.get("ema") is not None or any(
            is_optimizer(part) and is_training(unwrapped(part)) for part in self.parts.values()
        )
        check_current(name, self._modules, averaged=phase.averaged and averages)

    def _known(self) -> str:
        return f"the modules are {', '.join(self._modules) or 'none'}"


class _Keeper(Protocol):
    def restore(self) -> None: ...

    def changes(self) -> Iterator[str]: ...


class _Frame:
    """An open phase: what it declares, and everything that must be as it was when it ends."""

    def __init__(self, phases: Phases, name: str, phase: Phase, weights: Weights):
        self.name, self.phase, self.weights = name, phase, weights
        modules = phases._wrapped
        # What shards, swaps or offloads a part may exchange its tensors and hooks in a forward: it keeps its own.
        settled = {
            part: module
            for part, module in phases._modules.items()
            if part in weights.parts or why_rearranged(module) is None
        }
        fixed = {part: module for part, module in settled.items() if part not in phases._immovable}
        self.trained = {
            f"{part}.{path}"
            for part, module in fixed.items()
            for path, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self.structure = Structure(fixed)
        gathered = GatheredShards(phases._modules)  # before anyone asks for parameters: gathered ones are others
        self.standins: list[EmaWeights | ScheduleFreeMode] = [
            ScheduleFreeMode(part) for part in phases.parts.values() if is_optimizer(part)
        ]
        if phases.parts.get("ema") is not None and phases.has("unet"):
            parameters = list(phases.module("unet").parameters())
            self.standins.append(EmaWeights(phases.parts["ema"], parameters, needed=phase.averaged))
        # In the order in which they are put back. Random streams are last: nothing after them may draw.
        self.keepers: tuple[_Keeper, ...] = (
            Hooks(fixed),
            CompiledCalls(phases._modules),
            self.structure,
            gathered,
            weights,
            Gradients(settled),
            *reversed(self.standins),
            Casts(weights),
            Modes(modules),
            RequiresGrad(modules),
            Settings(settled),
            Flags(phases.device),
            RandomStreams(),
        )

    def restore(self) -> list[str]:
        """Put everything back; what could not be is told, and does not keep the rest from it."""
        failures = []
        for keeper in self.keepers:
            try:
                keeper.restore()
            except Exception as error:
                failures.append(f"{type(keeper).__name__}: {type(error).__name__}: {error}")
        return failures

    def changes(self) -> list[str]:
        """What is not as it was."""
        return [line for keeper in self.keepers for line in keeper.changes()] + list(self.weights.values_changed())
