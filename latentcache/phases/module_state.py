"""The state of modules, without the values of their tensors: modes, requires_grad, structure, hooks, settings.

Each class is a snapshot of one of these for every submodule. `restore` puts it back, object by object, and `changes`
names what differs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

Modules = Mapping[str, torch.nn.Module]
"""Modules by the name of the part."""

STRUCTURE = ("_parameters", "_buffers", "_modules")
OFFLOAD_ATTRIBUTES = ("_hf_hook", "_old_forward", "forward", "_diffusers_hook", "_compiled_call_impl")
"""Accelerate, diffusers and `module.compile()` set these on a module to change how it is called."""

_ABSENT = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, tuple, dict, set, OrderedDict)
_COMPARED = (*_PLAIN, set)
_SAVED_ELSEWHERE = frozenset(("training", *STRUCTURE, *OFFLOAD_ATTRIBUTES))


def submodules(modules: Modules) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every submodule with its dotted name, the part first."""
    for part, module in modules.items():
        for path, submodule in module.named_modules():
            yield f"{part}.{path}" if path else part, submodule


class TrainingModes:
    """The training flag of every submodule."""

    def __init__(self, modules: Modules):
        self._flags = [(name, module, module.training) for name, module in submodules(modules)]

    def restore(self) -> None:
        """Set the flags that differ."""
        for _, module, training in self._flags:
            if module.training != training:
                module.training = training

    def changes(self) -> Iterator[str]:
        """The submodules in another mode."""
        for name, module, training in self._flags:
            if module.training != training:
                yield f"{name}: is in {'train' if module.training else 'eval'} mode"


class RequiresGrad:
    """Which parameters are trained."""

    def __init__(self, modules: Modules):
        self._flags = [
            (f"{part}.{name}", parameter, parameter.requires_grad)
            for part, module in modules.items()
            for name, parameter in module.named_parameters()
        ]

    def restore(self) -> None:
        """Set the flags that differ."""
        for _, parameter, requires_grad in self._flags:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)

    def changes(self) -> Iterator[str]:
        """The parameters whose flag differs."""
        for name, parameter, requires_grad in self._flags:
            if parameter.requires_grad != requires_grad:
                yield f"{name}: requires_grad is {parameter.requires_grad}"


class _Contents:
    """The contents of some dicts of every submodule, by reference."""

    def __init__(self, dicts: Iterable[tuple[str, dict[Any, Any]]]):
        self._kept = [(name, contents, dict(contents)) for name, contents in dicts]

    def restore(self) -> None:
        """Put back what the dicts held."""
        for _, contents, kept in self._kept:
            if _differs(contents, kept):
                contents.clear()
                contents.update(kept)

    def changes(self) -> Iterator[str]:
        """The keys that were added, removed or replaced."""
        for name, contents, kept in self._kept:
            for key in (*kept, *(key for key in contents if key not in kept)):
                if contents.get(key, _ABSENT) is not kept.get(key, _ABSENT):
                    yield f"{name}.{key}: was {_verb(key, contents, kept)}"


class ModuleStructure(_Contents):
    """The identity of every Parameter, buffer and submodule: an optimizer refers to the objects themselves."""

    def __init__(self, modules: Modules):
        modules_by_name = list(submodules(modules))
        super().__init__(
            (f"{name}.{kind}", vars(module)[kind]) for name, module in modules_by_name for kind in STRUCTURE
        )
        self._parameters = [
            (f"{name}.{key}", module, key, parameter)
            for name, module in modules_by_name
            for key, parameter in module._parameters.items()
        ]

    def replaced_parameters(self) -> Iterator[str]:
        """The names that have another Parameter now, or none."""
        for name, module, key, parameter in self._parameters:
            if module._parameters.get(key) is not parameter:
                yield name


class ModuleHooks:
    """The hooks of every submodule: torch's own, and the offload hooks of accelerate and diffusers."""

    def __init__(self, modules: Modules):
        modules_by_name = list(submodules(modules))
        self._torch = _Contents(
            (f"{name}.{attribute}", value)
            for name, module in modules_by_name
            for attribute, value in vars(module).items()
            if is_hook_dict(attribute, value)
        )
        self._attributes = [
            (f"{name}.{attribute}", module, attribute, vars(module).get(attribute, _ABSENT))
            for name, module in modules_by_name
            for attribute in OFFLOAD_ATTRIBUTES
        ]

    def restore(self) -> None:
        """Put back the hooks, and remove those that were added."""
        self._torch.restore()
        for _, module, attribute, value in self._attributes:
            _put_back(module, attribute, value)

    def changes(self) -> Iterator[str]:
        """The hooks that were added, removed or replaced."""
        yield from self._torch.changes()
        for name, module, attribute, value in self._attributes:
            if vars(module).get(attribute, _ABSENT) is not value:
                yield f"{name}: was {'added' if value is _ABSENT else 'changed'}"


class CompiledCalls:
    """How compiled submodules are called: by `module.compile()`, or by `torch.compile` of a submodule."""

    def __init__(self, modules: Modules):
        self._kept = [
            (name, module, attribute, vars(module)[attribute])
            for name, module in submodules(modules)
            for attribute in _compiled_attributes(module)
        ]

    def restore(self) -> None:
        """Call compiled what was compiled."""
        for _, module, attribute, value in self._kept:
            _put_back(module, attribute, value)

    def changes(self) -> Iterator[str]:
        """The submodules that are called otherwise."""
        for name, module, attribute, value in self._kept:
            if vars(module).get(attribute) is not value:
                yield f"{name}: is no longer called as it was compiled"


class ModuleSettings:
    """Plain data, functions and containers on every submodule.

    Among them are LoRA adapters and their scale, gradient checkpointing, tiling and slicing, attention processors.
    """

    def __init__(self, modules: Modules):
        self._kept = [
            (name, module, {key: (value, _copied(value)) for key, value in _plain_attributes(module)})
            for name, module in submodules(modules)
        ]

    def restore(self) -> None:
        """Put back the attributes and what containers hold, and remove attributes that were added."""
        for _, module, kept in self._kept:
            for key in [key for key, _ in _plain_attributes(module) if key not in kept]:
                del vars(module)[key]
            for key, (value, contents) in kept.items():
                _refill(value, contents)
                _put_back(module, key, value)

    def changes(self) -> Iterator[str]:
        """The attributes that differ, were added or removed."""
        for name, module, kept in self._kept:
            for key, (_, contents) in kept.items():
                found = vars(module).get(key, _ABSENT)
                if found is _ABSENT or not _same(found, contents):
                    yield f"{name}.{key}: is {'gone' if found is _ABSENT else repr(found)}, was {contents!r}"
            yield from (f"{name}.{key}: was added" for key, _ in _plain_attributes(module) if key not in kept)


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


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value)((key, _copied(child)) for key, child in value.items())
    return type(value)(map(_copied, value)) if type(value) in _CONTAINERS else value


def _refill(value: Any, contents: Any) -> None:
    """Give a list, dict or set of the module its contents again. A tuple cannot change, but the items in it can."""
    if _same(value, contents):
        return
    if isinstance(value, tuple):
        for child, child_contents in zip(value, contents, strict=True):
            _refill(child, child_contents)
    elif isinstance(value, list):
        value[:] = _copied(contents)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(_copied(contents))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    # True == 1, and a setting that became another type has changed.
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    # Other objects in a container, such as peft's LoraConfig, are compared by identity alone.
    return isinstance(one, _COMPARED) and bool(one == other or one != one)


def _put_back(module: torch.nn.Module, attribute: str, value: Any) -> None:
    # Past Module.__setattr__, which would look into parameters and submodules.
    if value is _ABSENT:
        vars(module).pop(attribute, None)
    elif vars(module).get(attribute, _ABSENT) is not value:
        vars(module)[attribute] = value


def _differs(contents: Mapping[Any, Any], kept: Mapping[Any, Any]) -> bool:
    return list(contents) != list(kept) or any(contents[key] is not kept[key] for key in kept)


def _verb(key: Any, contents: Mapping[Any, Any], kept: Mapping[Any, Any]) -> str:
    return "removed" if key not in contents else "added" if key not in kept else "replaced"
