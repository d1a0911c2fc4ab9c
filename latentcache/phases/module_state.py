"""The state of modules, without the values of their tensors: modes, requires_grad, structure, hooks, settings.

Each class is a snapshot of one of these for every submodule. `restore` puts it back, object by object, and `changes`
names what differs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import Any, ClassVar

import torch
from typing_extensions import override

Modules = Mapping[str, torch.nn.Module]
"""Modules by the name of the part."""

STRUCTURE = ("_parameters", "_buffers", "_modules")
OFFLOAD_ATTRIBUTES = ("_hf_hook", "_old_forward", "forward", "_diffusers_hook", "_compiled_call_impl")
"""Accelerate, diffusers and `module.compile()` set these on a module to change how it is called."""

_ABSENT = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, tuple, dict, set, OrderedDict)
_SAVED_ELSEWHERE = frozenset(("training", *STRUCTURE, *OFFLOAD_ATTRIBUTES))


def submodules(modules: Modules) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every submodule with its dotted name, the part first."""
    for part, module in modules.items():
        for path, submodule in module.named_modules():
            yield f"{part}.{path}" if path else part, submodule


def parameters(modules: Modules) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every parameter with its dotted name, the part first."""
    for part, module in modules.items():
        for name, parameter in module.named_parameters():
            yield f"{part}.{name}", parameter


class Snapshot:
    """Something as it is now, which can be restored."""

    def restore(self) -> None:
        """Put it back as it was."""
        raise NotImplementedError

    def changes(self) -> Iterator[str]:
        """What differs, in words: nothing, where another snapshot reports it."""
        yield from ()


class _Flags(Snapshot):
    """A flag of each of some objects."""

    def __init__(self, flag: str, owners: Iterable[tuple[str, Any]]):
        self._flag = flag
        self._kept = [(name, owner, getattr(owner, flag)) for name, owner in owners]

    @override
    def restore(self) -> None:
        for _, owner, value in self._kept:
            if getattr(owner, self._flag) != value:
                setattr(owner, self._flag, value)

    @override
    def changes(self) -> Iterator[str]:
        for name, owner, value in self._kept:
            if getattr(owner, self._flag) != value:
                yield f"{name}: {self._flag} is {not value}"


class TrainingModes(_Flags):
    """The training flag of every submodule."""

    def __init__(self, modules: Modules):
        super().__init__("training", submodules(modules))


class RequiresGrad(_Flags):
    """Which parameters are trained."""

    def __init__(self, modules: Modules):
        super().__init__("requires_grad", parameters(modules))


class _Contents(Snapshot):
    """What some dicts, lists and sets hold, by reference."""

    def __init__(self, containers: Iterable[tuple[str, Any]]):
        self._kept = [(name, contents, copy(contents)) for name, contents in containers]

    @override
    def restore(self) -> None:
        for _, contents, kept in self._kept:
            if _same_items(contents, kept):
                continue
            if isinstance(contents, list):
                contents[:] = kept
            else:
                contents.clear()
                contents.update(kept)

    @override
    def changes(self) -> Iterator[str]:
        for name, contents, kept in self._kept:
            if isinstance(contents, dict):
                for key in (*kept, *(key for key in contents if key not in kept)):
                    if not _same(contents.get(key, _ABSENT), kept.get(key, _ABSENT)):
                        verb = "removed" if key not in contents else "added" if key not in kept else "replaced"
                        yield f"{name}.{key}: was {verb}"
            elif not _same_items(contents, kept):
                yield f"{name}: is {contents!r}, was {kept!r}"


class _Attributes(Snapshot):
    """Attributes in the `__dict__` of modules, by reference: past what the classes make of setting them."""

    differs: ClassVar = "was changed"

    def __init__(self, attributes: Iterable[tuple[str, torch.nn.Module, str]]):
        self._kept = [
            (name, module, attribute, vars(module).get(attribute, _ABSENT)) for name, module, attribute in attributes
        ]

    @override
    def restore(self) -> None:
        for _, module, attribute, value in self._kept:
            if value is _ABSENT:
                vars(module).pop(attribute, None)
            else:
                vars(module)[attribute] = value

    @override
    def changes(self) -> Iterator[str]:
        for name, module, attribute, value in self._kept:
            found = vars(module).get(attribute, _ABSENT)
            if not _same(found, value):
                yield f"{name}.{attribute}: {'was added' if value is _ABSENT else self.differs}"


class ModuleStructure(_Contents):
    """The identity of every Parameter, buffer and submodule: an optimizer refers to the objects themselves."""

    def __init__(self, modules: Modules):
        super().__init__(
            (f"{name}.{kind}", vars(module)[kind]) for name, module in submodules(modules) for kind in STRUCTURE
        )

    def replaced_parameters(self) -> Iterator[str]:
        """The names that have another Parameter now, or none."""
        for name, contents, kept in self._kept:
            if name.endswith("._parameters"):
                prefix = name.removesuffix("_parameters")
                yield from (prefix + key for key, parameter in kept.items() if contents.get(key) is not parameter)


class ModuleHooks(_Attributes):
    """The hooks of every submodule: torch's own, and the offload hooks of accelerate and diffusers."""

    def __init__(self, modules: Modules):
        by_name = list(submodules(modules))
        super().__init__((name, module, attribute) for name, module in by_name for attribute in OFFLOAD_ATTRIBUTES)
        self._torch = _Contents(
            (f"{name}.{attribute}", value)
            for name, module in by_name
            for attribute, value in vars(module).items()
            if is_hook_dict(attribute, value)
        )

    @override
    def restore(self) -> None:
        _Attributes.restore(self)
        self._torch.restore()

    @override
    def changes(self) -> Iterator[str]:
        yield from self._torch.changes()
        yield from super().changes()


class CompiledCalls(_Attributes):
    """How compiled submodules are called: by `module.compile()`, or by `torch.compile` of a submodule."""

    differs = "is no longer called as it was compiled"

    def __init__(self, modules: Modules):
        super().__init__(
            (name, module, attribute)
            for name, module in submodules(modules)
            for attribute in _compiled_attributes(module)
        )


class ModuleSettings(_Attributes):
    """Plain data, functions and containers on every submodule.

    Among them are LoRA adapters and their scale, gradient checkpointing, tiling and slicing, attention processors.
    """

    def __init__(self, modules: Modules):
        self._settings = [(name, module, dict(_plain_attributes(module))) for name, module in submodules(modules)]
        super().__init__((name, module, key) for name, module, settings in self._settings for key in settings)
        self._contents = _Contents(
            found
            for name, _, settings in self._settings
            for key, value in settings.items()
            for found in _containers(f"{name}.{key}", value)
        )

    @override
    def restore(self) -> None:
        for _, module, settings in self._settings:
            for key in [key for key, _ in _plain_attributes(module) if key not in settings]:
                del vars(module)[key]
        _Attributes.restore(self)
        self._contents.restore()

    @override
    def changes(self) -> Iterator[str]:
        yield from super().changes()
        yield from self._contents.changes()
        for name, module, settings in self._settings:
            yield from (f"{name}.{key}: was added" for key, _ in _plain_attributes(module) if key not in settings)


def call_eagerly(modules: Modules) -> None:
    """Let the compiled submodules run uncompiled from now on."""
    for _, module in submodules(modules):
        for attribute in _compiled_attributes(module):
            # Past OptimizedModule.__setattr__, which sets it on the module inside.
            vars(module)[attribute] = vars(module)["_modules"]["_orig_mod"].__call__ if attribute == "forward" else None


def is_hook_dict(attribute: str, value: Any) -> bool:
    """Whether torch keeps hooks in this attribute; some have companions such as `_forward_hooks_with_kwargs`."""
    return isinstance(value, dict) and attribute.startswith("_") and "_hooks" in attribute


def _compiled_attributes(module: torch.nn.Module) -> Iterator[str]:
    """The attributes that a compiled call goes through: `module.compile()` sets the first; torch.compile wraps."""
    if vars(module).get("_compiled_call_impl") is not None:
        yield "_compiled_call_impl"
    if "_orig_mod" in module._modules:
        yield "forward"


def _plain_attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        if (
            key not in _SAVED_ELSEWHERE
            and not is_hook_dict(key, value)
            and (isinstance(value, _PLAIN) or type(value) in _CONTAINERS or callable(value))
        ):
            yield key, value


def _containers(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every container in a setting. A tuple cannot change, but what is in it can."""
    if type(value) not in _CONTAINERS:
        return
    if type(value) is not tuple:
        yield name, value
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in children:
        yield from _containers(f"{name}.{key}", child)


def _same_items(one: Any, other: Any) -> bool:
    if isinstance(one, set):
        return bool(one == other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(map(_same, one, other))


def _same(one: Any, other: Any) -> bool:
    """Whether they are one object, or equal plain values of one type: True == 1, but a setting has changed."""
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other or one != one))
