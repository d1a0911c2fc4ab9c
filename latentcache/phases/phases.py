"""The phase switch: which parts of a model are on the device, in which mode; and training restored afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from latentcache.devices.audit import audit
from latentcache.devices.placement import DeviceLike, device_of
from latentcache.devices.tensor_location import is_optimizer, is_scaler, with_index
from latentcache.errors import PhaseError, add_note
from latentcache.families import DENOISERS
from latentcache.phases.model_parts import GatheredShards, ModelParts, ReducedGradients, managed_by
from latentcache.phases.state import BlockSwap, ComputeModes, EagerCalls, RandomStreams, Snapshot, TrainingModes
from latentcache.phases.weights import (
    REPAIR,
    CurrentStorage,
    EmaWeights,
    Gradients,
    ScheduleFreeMode,
    Weights,
    named_weights,
)
from latentcache.utils.signals import uninterrupted


@dataclass(frozen=True, slots=True)
class Phase:
    """Which parts are on the device, and which of them are in train mode. All other modules are parked, in eval mode.

    `averaged`: an EMA's weights, or those of a schedule-free optimizer's eval mode, take the place of the trained ones.
    """

    on_device: tuple[str, ...]
    training: tuple[str, ...] = ()
    averaged: bool = False


class Phases:
    """Switches the parts of a model between phases.

    `parts` are modules by name (`unet` or `transformer`, `vae`, `text_encoder`), and what trains them: `optimizer`,
    `scaler`, `ema`. Modules may be wrapped by DistributedDataParallel, `torch.compile` or accelerate: the eager module
    inside is the one that `module` returns. `device` is where phases put parts, `park` where they put the others.

    The parts that have parameters to train, and the denoiser, are on the device in `train`, `validate` and `sample`.
    They are in train mode only in `train`; the other two use averaged weights. `enter` takes a phase of your own too.
    Parts that other software places are never moved: quantised, FSDP and ZeRO-3 parts, parts under offload hooks,
    block swap or layer offload that `audit` knows, and those named in `immovable`. Nor are parts under
    DistributedDataParallel, which would lose its hooks (code in a phase must not cast them either), and parts whose
    memory on the device is another tensor's too, such as the flat buffer of an optimizer.
    The averages of an `ema` stay where they are.
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
        trained = tuple(self._model.trained())
        needed = tuple(name for name in self._model.modules if name in DENOISERS or name in trained)
        self._phases = {
            "train": Phase(needed, trained),
            "validate": Phase(needed, averaged=True),
            "sample": Phase(needed, averaged=True),
        }
        self._base: tuple[str, Phase] | None = None
        self._open_phases: list[_OpenPhase] = []
        self._memory = CurrentStorage()

    # What is where

    @property
    def parts(self) -> dict[str, Any]:
        """The parts as they were given."""
        return self._model.parts

    def module(self, name: str) -> torch.nn.Module:
        """The eager module of a part, without wrappers. PhaseError if there is no such part."""
        if name not in self._model.modules:
            raise PhaseError(f"there is no part {name!r}; {self._model.known()}", phase=self.current)
        return self._model.modules[name]

    def has(self, *names: str) -> bool:
        """Whether all these modules are among the parts."""
        return self._model.modules.keys() >= set(names)

    @property
    def current(self) -> str:
        """The name of the innermost phase."""
        return self._open_phases[-1].name if self._open_phases else self._base[0] if self._base else "none"

    def on_device(self) -> frozenset[str]:
        """The parts that have a tensor on the device now, also where other code put it there."""
        return frozenset(
            name
            for name, part in self._model.modules.items()
            if any(tensor.device == self.device for _, tensor in named_weights(part))
        )

    def not_moved(self) -> dict[str, str]:
        """The parts that phases leave where they are, with the reason."""
        managed = self._model.managed()
        if self._open_phases:
            return {**managed, **self._open_phases[0].weights.pinned}
        return {**managed, **self._model.pinned(self._park, managed)}

    # The switch

    def start(self, name: str = "train") -> None:
        """Begin a phase that has no end, such as the training itself: place the parts and set their modes.

        DeviceMismatchError if the audit finds a tensor elsewhere; PhaseError if a part cannot be trained as it is.
        """
        if self._open_phases:
            raise PhaseError("start is for the phase outside of all others; leave this one first", phase=self.current)
        phase = self._phase(name)
        self._base = (name, phase)
        self._model.check_ready(name, phase.on_device, averaged=phase.averaged)
        self._declare(phase, self._weights(CurrentStorage()), modes=True)

    @contextmanager
    def enter(self, phase: str | Phase) -> Iterator[Phases]:
        """Apply a phase, without gradients; at its end put back what it changed, also after an error or Ctrl-C.

        Put back are the training flag of every submodule, requires_grad, device, dtype and memory of every parameter
        and buffer, gradients, compiled calls, random streams, gradient mode and autocast, EMA weights, the mode of a
        schedule-free optimizer and that of block swap, which a part that the phase runs and does not train has for
        inference. What code in a phase casts is as it was from the next switch on. Nothing else is put back: adapters,
        hooks, attention processors and other settings that code in the phase changes stay changed, and so do torch's
        other global flags. The GradScaler and schedulers are not touched. Ctrl-C waits while state is put back. Phases
        nest. Tensors of parts that other software places (see the class) are left alone.

        Args:
            phase: The name of a phase, or one of your own.

        Yields:
            These phases.

        Raises:
            DeviceMismatchError: The audit at the beginning finds a tensor elsewhere.
            PhaseError: The phase cannot be entered, or something could not be put back; the rest is put back all the
                same. A part that cannot come back, because its device has no room, stays whole on the other one:
                `place` repairs that.
        """
        name, phase = (phase, self._phase(phase)) if isinstance(phase, str) else ("custom", phase)
        self._model.check_names(name, phase.on_device, phase.training)
        with self._entered(name, phase, self._model.modules):
            yield self

    @contextmanager
    def lend(self, *names: str) -> Iterator[None]:
        """Put these parts on the device too, in eval mode, to decode images or encode a prompt; then put them back.

        In a phase only these parts are looked at and put back.

        Args:
            names: Names of modules.

        Raises:
            PhaseError: There is no such part, and as for `enter`.
        """
        for name in names:
            self.module(name)
        now = self._phase_now()
        phase = replace(now, on_device=tuple(dict.fromkeys((*now.on_device, *names))))
        # Outside of all phases nobody else puts back what code in the block does to the other parts.
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
            # Still open if Ctrl-C came on the way into the block above, before it had to wait.
            if opened in self._open_phases:
                with uninterrupted():
                    self._close(opened)

    def place(self) -> None:
        """Declare the placement of the current phase again: call it after code that may have moved parts away."""
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
        # Kept only when the phase is open: memory of a refused phase, however old, would be put back in a later one.
        memory = self._memory if self._open_phases else CurrentStorage()
        weights = self._weights(memory, parts)
        switched = {part for each in self._open_phases for part in each.block_swaps}
        opened = _OpenPhase(name, phase, self._model, weights, self.device, parts, switched)
        self._memory = memory
        self._open_phases.append(opened)
        try:
            self._apply(phase, weights, opened.modules)
            for averages in opened.averages if phase.averaged else ():
                averages.swap_in()
            for block_swap in opened.block_swaps.values():
                block_swap.apply()
            self._audit(phase, weights)
        except BaseException:
            self._close(opened)
            raise
        return opened

    def _close(self, opened: _OpenPhase | None) -> None:
        if opened is None:
            return  # it was refused
        failures = opened.restore()
        self._open_phases.remove(opened)
        if not self._open_phases:
            self._memory = CurrentStorage()  # no memory is kept while no phase is open
        if failures:
            raise PhaseError(
                "not everything could be put back as it was:", phase=opened.name, offenders=tuple(failures)
            )

    def _apply(self, phase: Phase, weights: Weights, modules: Mapping[str, torch.nn.Module]) -> None:
        """Place the weights, parked parts first: they make room. Then set the modes of these modules."""
        for name in weights.parts:
            if name not in phase.on_device:
                weights.place(name, self._park)
        for name in weights.parts:
            if name in phase.on_device:
                weights.place(name, self.device)
        for name, module in modules.items():
            module.train(name in phase.training)
        if not phase.training:
            EagerCalls(modules).apply()

    def _audit(self, phase: Phase, weights: Weights) -> None:
        devices = {name: self.device if name in phase.on_device else self._park for name in weights.parts}
        # A pinned part that is to be parked stays where it is; one that is needed on the device must be there.
        devices = {name: to for name, to in devices.items() if name in phase.on_device or name not in weights.pinned}
        training = {name: name in phase.training for name in devices} if self._open_phases or not phase.training else {}
        audited: dict[str, Any] = {name: self._model.modules[name] for name in devices}
        trained = self._model.trained()
        if trained and all(devices.get(name) == self.device for name in trained):
            # What trains them, where all trained parts are where training has them.
            audited |= {name: part for name, part in self.parts.items() if is_optimizer(part) or is_scaler(part)}
        audit(audited, device=devices, training=training).raise_for_errors()

    def _weights(self, memory: CurrentStorage, names: Collection[str] | None = None) -> Weights:
        """The weights of these parts, by default of all, as far as phases may move them."""
        if self._open_phases:  # whether a part may be moved is decided when the outermost phase begins
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
        if self._open_phases:
            return self._open_phases[-1].phase
        return self._base[1] if self._base else self._phases["train"]


class _OpenPhase:
    """A phase from its beginning to its end: what it declares, and snapshots of what it changes in these parts."""

    def __init__(
        self,
        name: str,
        phase: Phase,
        model: ModelParts,
        weights: Weights,
        device: torch.device,
        parts: Collection[str],
        switched: Collection[str],
    ):
        self.name, self.phase, self.weights = name, phase, weights
        self.modules = {part: module for part, module in model.modules.items() if part in parts}
        # Those that run without a backward, unless the phase around this one has `switched` them.
        run = {*phase.on_device} - {*phase.training} - {*switched}
        self.block_swaps = {part: BlockSwap(module) for part, module in self.modules.items() if part in run}
        # Software that shards, swaps or offloads a part may exchange the part's tensors in a forward.
        settled = {
            part: module for part, module in self.modules.items() if part in weights.parts or managed_by(module) is None
        }
        gathered = GatheredShards(self.modules)  # before any use of the parameters: gathered ones are others
        self.averages: list[EmaWeights | ScheduleFreeMode] = [
            ScheduleFreeMode(part) for part in model.parts.values() if is_optimizer(part)
        ]
        denoiser = next((name for name in DENOISERS if name in model.modules), None)
        if model.parts.get("ema") is not None and denoiser is not None:
            averaged = list(model.modules[denoiser].parameters())
            self.averages.append(EmaWeights(model.parts["ema"], averaged, needed=phase.averaged))
        # In the order in which they are restored. Random streams are last: nothing after them may draw.
        self._snapshots: tuple[Snapshot, ...] = (
            gathered,
            weights,
            ReducedGradients(settled, model.reduced_parameters()),
            *self.block_swaps.values(),  # before averages: their state is where training has the weights
            *reversed(self.averages),
            Gradients(settled),  # after the weights: a parameter takes only a gradient of its own dtype
            TrainingModes({part: module for part, module in model.wrapped.items() if part in parts}),
            EagerCalls(self.modules),
            ComputeModes(device),
            RandomStreams(),
        )

    def restore(self) -> list[str]:
        """Restore everything, and say what could not be. A snapshot that fails does not keep the others from it."""
        failures = []
        for snapshot in self._snapshots:
            try:
                snapshot.restore()
            except Exception as error:
                failures.append(f"{type(snapshot).__name__}: {type(error).__name__}: {error}")
        return failures + [line for snapshot in self._snapshots for line in snapshot.changes()]
