"""The phase switch: which parts of a model are on the device, and in which mode, with training restored afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from latentcache.checkpoints.parts import OPEN_PHASES
from latentcache.devices.audit import audit
from latentcache.devices.optimizer import named_params
from latentcache.devices.placement import DeviceLike, device_of
from latentcache.devices.tensor_location import is_optimizer, is_scaler, named_weights, with_index
from latentcache.errors import PhaseError, add_note
from latentcache.families import DENOISERS
from latentcache.phases.model_parts import GatheredShards, ModelParts, ReducedGradients, is_trained, managed_by
from latentcache.phases.state import BlockSwap, ComputeModes, EagerCalls, RandomStreams, Snapshot, TrainingModes
from latentcache.phases.weights import (
    REPAIR,
    Averages,
    CurrentStorage,
    EmaWeights,
    Gradients,
    ScheduleFreeMode,
    Weights,
)
from latentcache.utils.signals import uninterrupted


@dataclass(frozen=True, slots=True)
class Phase:
    """Which parts are on the device, and which of them are in train mode. The other parts are parked, in eval mode.

    `averaged` replaces the trained weights by those of an EMA, or of a schedule-free optimizer's eval mode.
    """

    on_device: tuple[str, ...]
    training: tuple[str, ...] = ()
    averaged: bool = False


class Phases:
    """Switches the parts of a model between phases.

    `parts` are the modules by name (`unet` or `transformer`, `vae`, `text_encoder`), and what trains them: `optimizer`,
    `scaler`, `ema`. Modules may be wrapped by DistributedDataParallel, `torch.compile` or accelerate; `module` returns
    the eager module inside. `device` is where phases put the parts they need, `park` where they put the others.

    In `train`, `validate` and `sample` the denoiser and all trained parts are on the device. They are in train mode
    only in `train`; the other two use averaged weights. `enter` also takes a phase of your own.

    Some parts are never moved. Other software places quantised, FSDP and ZeRO-3 parts, parts under offload hooks, block
    swap or layer offload that `audit` knows, and those in `immovable`. Trained parts of several processes would lose
    DistributedDataParallel's hooks, so code in a phase must not cast them either. Parts that share memory on the device
    with another tensor, such as an optimizer's flat buffer, would be separated from it. An EMA's averages stay too.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        *,
        device: DeviceLike,
        park: DeviceLike = "cpu",
        immovable: Collection[str] = (),
    ):
        self.device, self._park = with_index(device_of(device)), with_index(device_of(park))
        self._model = ModelParts(parts, immovable)
        trained = tuple(name for name, module in self._model.modules.items() if is_trained(module))
        needed = tuple(name for name in self._model.modules if name in DENOISERS or name in trained)
        self._phases = {
            "train": Phase(needed, trained),
            "validate": Phase(needed, averaged=True),
            "sample": Phase(needed, averaged=True),
        }
        self._base = "none", self._phases["train"]
        """The name of the phase outside of all open ones, and the phase."""
        self._open_phases: list[_OpenPhase] = []
        self._memory = CurrentStorage()

    # What is where

    @property
    def parts(self) -> dict[str, Any]:
        """The parts as given."""
        return self._model.parts

    def module(self, name: str) -> torch.nn.Module:
        """The eager module of a part, without wrappers. Raises PhaseError if there is no such part."""
        if name not in self._model.modules:
            raise PhaseError(f"there is no part {name!r}; {self._model.known()}", phase=self.current)
        return self._model.modules[name]

    def has(self, *names: str) -> bool:
        """Whether the parts include all these modules."""
        return self._model.modules.keys() >= set(names)

    @property
    def current(self) -> str:
        """The name of the innermost open phase."""
        return self._open_phases[-1].name if self._open_phases else self._base[0]

    def on_device(self) -> frozenset[str]:
        """The parts with a tensor on the device now, whoever put it there."""
        return frozenset(
            name
            for name, part in self._model.modules.items()
            if any(tensor.device == self.device for _, tensor in named_weights(part))
        )

    def not_moved(self) -> dict[str, str]:
        """The parts that phases never move, each with the reason."""
        return {**self._model.managed(), **self._weights(CurrentStorage()).pinned}

    # The switch

    def start(self, name: str = "train") -> None:
        """Begin a phase that has no end, such as the training itself: place the parts and set their modes.

        Raises DeviceMismatchError if the audit finds a misplaced tensor, PhaseError if a part cannot be trained as it
        is.
        """
        if self._open_phases:
            raise PhaseError("start begins the outermost phase; leave this one first", phase=self.current)
        phase = self._phase(name)
        self._base = (name, phase)
        self._model.check_ready(name, phase.on_device, averaged=phase.averaged)
        self._declare(phase, self._weights(CurrentStorage()), modes=True)

    @contextmanager
    def enter(self, phase: str | Phase) -> Iterator[Phases]:
        """Apply a phase without gradients, and restore the state before it at the end, even after an error or Ctrl-C.

        Restored are training flags, `requires_grad`, the device, dtype and memory of parameters and buffers, gradients,
        compiled calls, random streams, gradient mode, autocast, and averaged weights, whether an EMA's or a
        schedule-free optimizer's. Block swap is switched to inference for parts that the phase runs without training
        them. Casts by code in the phase are undone at the next switch. Everything else stays as that code leaves it:
        adapters, hooks, attention processors, torch's global flags. The GradScaler and schedulers are not touched, nor
        are tensors of parts that other software places. Inside, pending gradients are out of reach (`grad` is None),
        and a trainer's own validation may swap averages too. Ctrl-C waits while state is restored. Phases nest.

        Args:
            phase: The name of a phase, or one of your own.

        Yields:
            These phases.

        Raises:
            DeviceMismatchError: The audit at the beginning finds a misplaced tensor.
            PhaseError: The phase cannot be entered, or something cannot be restored; all the rest is restored. A part
                whose device has no room stays whole on the other device, and `place` repairs that.
        """
        name, phase = (phase, self._phase(phase)) if isinstance(phase, str) else ("custom", phase)
        self._model.check_names(name, phase.on_device, phase.training)
        with self._entered(name, phase, self._model.modules):
            yield self

    @contextmanager
    def lend(self, *names: str) -> Iterator[None]:
        """Also put these parts on the device, in eval mode, to decode images or encode a prompt; then put them back.

        Inside a phase only these parts are restored.

        Args:
            names: Names of modules.

        Raises:
            PhaseError: There is no such part, or as for `enter`.
        """
        for name in names:
            self.module(name)
        now = self._phase_now()
        phase = replace(now, on_device=tuple(dict.fromkeys((*now.on_device, *names))))
        # Without a phase around it, nothing else restores what code in the block does to the other parts.
        parts = names if self._open_phases else self._model.modules
        with self._entered("custom", phase, parts):
            yield

    @contextmanager
    def _entered(self, name: str, phase: Phase, parts: Collection[str]) -> Iterator[None]:
        opened = None
        try:
            try:
                with uninterrupted():
                    opened = self._open(name, phase, parts)
                with torch.no_grad():
                    yield
            finally:
                with uninterrupted():
                    self._close(opened)
        finally:
            # Still open if Ctrl-C came just before the block above could make it wait.
            if opened in self._open_phases:
                with uninterrupted():
                    self._close(opened)

    def place(self) -> None:
        """Place the parts of the current phase again, after code that may have moved them."""
        if self._open_phases:
            self._open_phases[0].weights.restore_buffers()  # the outermost phase has all parts
            self._declare(self._open_phases[-1].phase, self._open_phases[0].weights, modes=True)
        else:
            self._declare(self._phase_now(), self._weights(CurrentStorage()), modes=False)

    # Inside

    def _declare(self, phase: Phase, weights: Weights, *, modes: bool) -> None:
        try:
            self._apply(phase, weights, self._model.modules if modes else {})
        except Exception as error:
            add_note(error, REPAIR)
            raise
        self._audit(phase, weights)

    def _open(self, name: str, phase: Phase, parts: Collection[str]) -> _OpenPhase:
        self._model.check_ready(name, phase.on_device, averaged=phase.averaged)
        # Assigned only once the phase is open, or a later phase would restore the memory of a refused one.
        memory = self._memory if self._open_phases else CurrentStorage()
        opened = _OpenPhase(self, name, phase, parts, memory)
        self._memory = memory
        self._open_phases.append(opened)
        OPEN_PHASES.append(opened)
        try:
            opened.gradients.apply()
            self._apply(phase, opened.weights, opened.modules)
            for snapshot in (*opened.averages, *opened.block_swaps.values()):
                snapshot.apply()
            self._audit(phase, opened.weights)
        except BaseException:
            self._close(opened)
            raise
        return opened

    def _close(self, opened: _OpenPhase | None) -> None:
        if opened is None:
            return  # it was refused
        failures = opened.restore()
        self._open_phases.remove(opened)
        OPEN_PHASES.remove(opened)
        if not self._open_phases:
            self._memory = CurrentStorage()  # releases the memory
        if failures:
            raise PhaseError("not everything could be restored:", phase=opened.name, offenders=tuple(failures))

    def _apply(self, phase: Phase, weights: Weights, modules: Mapping[str, torch.nn.Module]) -> None:
        """Place the weights, first the parts to park, which make room. Then set the modes of these modules."""
        for name in sorted(weights.parts, key=phase.on_device.__contains__):
            weights.place(name, self.device if name in phase.on_device else self._park)
        for name, module in modules.items():
            module.train(name in phase.training)
        if not phase.training:
            EagerCalls(modules).apply()

    def _audit(self, phase: Phase, weights: Weights) -> None:
        devices = {name: self.device if name in phase.on_device else self._park for name in weights.parts}
        # A pinned part cannot be parked, so it may stay where it is. If it is needed on the device it must be there.
        devices = {name: to for name, to in devices.items() if name in phase.on_device or name not in weights.pinned}
        training = {name: name in phase.training for name in devices} if self._open_phases or not phase.training else {}
        audited: dict[str, Any] = {name: self._model.modules[name] for name in devices}
        # What trains parts has its place only while all of them are on the device.
        others = [part for name, part in self._model.modules.items() if devices.get(name) != self.device]
        elsewhere = {id(parameter) for part in others for parameter in part.parameters()}
        for name, part in self.parts.items():
            if is_scaler(part) or (
                is_optimizer(part) and elsewhere.isdisjoint(id(p) for _, p, _ in named_params(part))
            ):
                audited[name] = part
        audit(audited, device=devices, training=training).raise_for_errors()

    def _weights(self, memory: CurrentStorage, names: Collection[str] | None = None) -> Weights:
        """The weights of those of these parts (default: all) that phases may move."""
        if self._open_phases:  # decided when the outermost phase began
            outermost = self._open_phases[0].weights
            movable, pinned = outermost.parts, outermost.pinned
        else:
            managed = self._model.managed()
            movable = tuple(name for name in self._model.modules if name not in managed)
            pinned = self._model.pinned(self._park, managed)
        chosen = {name: self._model.modules[name] for name in movable if names is None or name in names}
        return Weights(chosen, memory, self._park, pinned)

    def _phase(self, name: str) -> Phase:
        if name not in self._phases:
            raise PhaseError(f"is unknown; there are {', '.join(self._phases)}", phase=name)
        return self._phases[name]

    def _phase_now(self) -> Phase:
        return self._open_phases[-1].phase if self._open_phases else self._base[1]


class _OpenPhase:
    """A phase that is open: what it declares, and snapshots of all that it changes in these parts."""

    def __init__(self, phases: Phases, name: str, phase: Phase, parts: Collection[str], memory: CurrentStorage):
        model, outer = phases._model, phases._open_phases
        self.name, self.phase, self.weights = name, phase, phases._weights(memory, parts)
        self.modules = {part: module for part, module in model.modules.items() if part in parts}
        # Parts that run without a backward, unless an outer phase has switched them.
        run = {*phase.on_device} - {*phase.training} - {part for each in outer for part in each.block_swaps}
        self.block_swaps: dict[str, BlockSwap] = {part: BlockSwap(m) for part, m in self.modules.items() if part in run}
        # Sharding and offloading replace tensors in a forward, so only the other parts' tensors can be recorded.
        settled = {
            part: module
            for part, module in self.modules.items()
            if part in self.weights.parts or managed_by(module) is None
        }
        self.gradients = Gradients(settled)
        gathered = GatheredShards(self.modules)  # first, because gathered parameters are other objects
        # Averages stay in while an outer phase has them.
        is_averaged = phase.averaged and not any(each.phase.averaged for each in outer)
        self.averages: list[Averages] = [
            ScheduleFreeMode(part, needed=is_averaged) for part in model.parts.values() if is_optimizer(part)
        ]
        denoiser = next((model.modules[name] for name in DENOISERS if name in model.modules), None)
        if model.parts.get("ema") is not None and denoiser is not None:
            self.averages.append(EmaWeights(model.parts["ema"], [*denoiser.parameters()], needed=is_averaged))
        # In the order of restoring. Random streams are last, so that nothing draws after them.
        self._snapshots: tuple[Snapshot, ...] = (
            gathered,
            self.weights,
            *self.block_swaps.values(),  # before averages, whose state is where training has the weights
            *reversed(self.averages),
            self.gradients,  # after the weights, because a parameter takes only gradients of its own dtype
            TrainingModes({part: module for part, module in model.wrapped.items() if part in parts}),
            ReducedGradients(settled, model.reduced_parameters()),  # after `requires_grad`, which accumulators need
            EagerCalls(self.modules),
            ComputeModes(phases.device),
            RandomStreams(),
        )

    def restore(self) -> list[str]:
        """Restore every snapshot, even after one has failed. Returns what could not be restored."""
        failures: list[str] = []
        self.gradients.apply()  # removes those that code in the phase computed, which may not fit the weights' dtypes
        for snapshot in self._snapshots:
            try:
                failures += snapshot.restore() or ()
            except Exception as error:
                failures.append(f"{type(snapshot).__name__}: {type(error).__name__}: {error}")
        return failures
