"""Modules of a pipeline as JSON: class name and constructor settings, with weights replaced by their digests."""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from latentcache.devices.placement import dtype_of
from latentcache.errors import PipelineError
from latentcache.families import settings_of
from latentcache.families.parts import VAE_WEIGHTS
from latentcache.identity import canonical_json, digest
from latentcache.integrations.onetrainer.upstream import MISSING, RECOGNISED, class_name, constructor_settings
from latentcache.models.part_identity import module_identity, tokenizer_identity, weights_digest
from latentcache.utils.nested import named_tensors

logger = logging.getLogger("latentcache")


class _Unreadable(Exception):
    """A value that has no JSON form."""


def describe(module: Any, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Describe an upstream module as JSON.

    `provenance` states what cannot be inspected: under the name of the class or of an output the whole module, under
    the name of a setting that setting of every module. Raises PipelineError for a setting that is neither readable nor
    stated, and ModelError for weights without values.
    """
    name = class_name(module)
    for key in (name, *filter(None, module.get_outputs())):
        if key in provenance and name not in RECOGNISED:
            return {"class": name, "stated": provenance[key]}
    advice = "State what it is: provenance={{{!r}: 'version 1'}}. Change the value whenever its outputs change."
    settings: dict[str, Any] = {}
    for setting, value in constructor_settings(module).items():
        if setting in provenance:
            settings[setting] = {"stated": provenance[setting]}
            continue
        try:
            if value is MISSING:
                raise _Unreadable(f"its constructor takes {setting!r} but does not keep it, so its value is unknown")
            settings[setting] = _as_json(setting, value)
            if setting == "tokenizer" and getattr(module, "apply_chat_template", None) is not None:
                settings["chat_template"] = _as_json(setting, value.chat_template)
        except _Unreadable as error:
            problem = str(error) if value is MISSING else f"its setting {setting!r} is {error}"
            stated = advice.format(setting if name in RECOGNISED else name)
            raise PipelineError(f"{problem}. {stated}", module=name) from error
    if name not in RECOGNISED:
        logger.info(
            "%s is not a known module: its class and settings identify it: %s", name, ", ".join(settings) or "none"
        )
    return {"class": name, "settings": settings}


def plain_settings(name: str, value: Any) -> Any:
    """A setting of a concept or of the configuration as JSON. PipelineError if it has no JSON form."""
    try:
        return _as_json(name, value)
    except _Unreadable as error:
        raise PipelineError(f"the value of {name!r} is {error}") from error


def _as_json(setting: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        if isinstance(value, float) and not math.isfinite(value):
            raise _Unreadable(f"{value}, which cannot be written as JSON")
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, torch.nn.Module):
        return part_identity(setting, value)
    if getattr(value, "backend_tokenizer", None) is not None:
        return {"tokenizer": dataclasses.asdict(tokenizer_identity(setting, value))}
    if isinstance(value, FunctionType):
        return _function_json(setting, value)
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        shape = f"{data.dtype} {list(data.shape)}"
        return {"tensor": digest(data.reshape(-1).view(torch.uint8).numpy().data), "as": shape}
    return _container_as_json(setting, value)


def _container_as_json(setting: str, value: Any) -> Any:
    if isinstance(value, enum.Enum | torch.dtype | torch.device | PurePath):
        return str(value)
    if isinstance(value, torch.autocast):
        return {"autocast": value._enabled, "dtype": str(value.fast_dtype)} if value._enabled else None
    if isinstance(value, nullcontext):
        return None
    if isinstance(value, list | tuple):
        return [_as_json(setting, item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_as_json(setting, item) for item in value), key=canonical_json)
    if isinstance(value, Mapping):
        pairs = [[_as_json(setting, key), _as_json(setting, item)] for key, item in value.items()]
        return {"items": sorted(pairs, key=canonical_json)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _as_json(setting, getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": type(value).__name__, "fields": fields}
    raise _Unreadable(f"a {type(value).__name__}, which cannot be written as JSON")


# Functions put a caption into a chat template, or map a value. A function is identified by its code, its closure, its
# defaults and the globals that it names. A module among these counts by the functions and plain values that are named
# there, an installed one by its name. Another Python release compiles to other code, so values are cached again.


def _function_json(setting: str, function: FunctionType, seen: tuple[FunctionType, ...] = ()) -> Any:
    """A Python function as JSON. _Unreadable if it uses a value that has no JSON form."""
    if function in seen:
        return {"again": seen.index(function)}  # recursion

    used = {name for code in _codes(function.__code__) for name in code.co_names}

    def value(found: Any) -> Any:
        if isinstance(found, FunctionType):
            return _function_json(setting, found, (*seen, function))
        if isinstance(found, ModuleType):
            inside = {name: value(each) for name, each in sorted(_used_of(found, used).items())}
            return {"module": found.__name__, **({"used": inside} if inside else {})}
        if isinstance(found, type | BuiltinFunctionType):
            return {"named": f"{found.__module__}.{found.__qualname__}"}
        return _as_json(setting, found)

    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    named: Mapping[str, Any] = {name: function.__globals__[name] for name in used if name in function.__globals__}
    return {
        "code": digest(canonical_json([_code_json(code) for code in _codes(function.__code__)])),
        "closure": {name: value(_contents(cell)) for name, cell in cells},
        "defaults": [value(each) for each in function.__defaults__ or ()],
        "keyword_defaults": {name: value(each) for name, each in (function.__kwdefaults__ or {}).items()},
        "globals": {name: value(found) for name, found in sorted(named.items())},
    }


def _used_of(module: ModuleType, names: set[str]) -> dict[str, Any]:
    """What a function with these names may use of a module; nothing of an installed one, which counts by its name."""
    is_installed = {"site-packages", "dist-packages"} & set(PurePath(getattr(module, "__file__", None) or "").parts)
    if is_installed or module.__name__.partition(".")[0] in sys.stdlib_module_names:
        return {}
    inside = f"{module.__name__}."
    return {
        name: value
        for name, value in vars(module).items()
        if name in names
        and isinstance(value, FunctionType | ModuleType | bool | int | float | str)
        and (not isinstance(value, ModuleType) or value.__name__.startswith(inside))  # others might form a cycle
    }


def _contents(cell: CellType) -> Any:
    """The content of a closure cell; the cell itself, which has no JSON form, while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code, and the code of nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _code_json(code: CodeType) -> list[Any]:
    constants = [_constant(each) for each in code.co_consts if not isinstance(each, CodeType)]
    names = [list(code.co_names), list(code.co_varnames), list(code.co_freevars)]
    return [code.co_code.hex(), constants, names, code.co_argcount, code.co_kwonlyargcount, code.co_flags]


def _constant(value: Any) -> str:
    """A constant as text. The members of a set are sorted: their order differs from run to run."""
    members = sorted(map(repr, value)) if isinstance(value, frozenset) else value
    return f"{type(value).__name__} {members!r}"


# Weights


_State = tuple[list[torch.Tensor], Any]
"""The weights, referenced so that no other object can reuse their ids, and their fingerprint."""
_identities: weakref.WeakKeyDictionary[torch.nn.Module, tuple[_State, dict[str, Any]]] = weakref.WeakKeyDictionary()


def part_identity(part: str, module: torch.nn.Module) -> dict[str, Any]:
    """The identity of a part of a model: its class, its weights in their dtype, its config.

    It is cached as long as parameters and buffers are the same objects with the same versions, which torch increments
    on every in-place change. Changes through `.data` do not increment them and are not detected.
    """
    weights = _weights(module)
    known = _identities.get(module)
    if known is not None and weights is not None and known[0][1] == weights[1]:
        return known[1]
    dtype = dtype_of(module) or torch.float32
    # Only the encoder of a VAE counts, if it has one by that name.
    is_vae = part == "vae" and any(name.startswith("encoder.") for name in module.state_dict())
    names = VAE_WEIGHTS if is_vae else ("",)
    if hasattr(module, "config"):
        settings = settings_of(type(module).__name__)
        identity: dict[str, Any] = {"part": dataclasses.asdict(module_identity(part, module, dtype, names, settings))}
    else:
        identity = {"part": {"class_name": class_name(module), "weights": weights_digest(part, module, dtype, names)}}
    identity["dtype"] = str(dtype)
    if len({tensor.dtype for tensor in _tensors(module) if tensor.is_floating_point()}) > 1:
        # Rounded to one dtype, they could equal those of another module.
        identity["as_stored"] = weights_digest(part, module, None, names)
    if hooks := _replaced_forwards(part, module):
        identity["hooked"] = hooks
    if weights is not None:
        _identities[module] = weights, identity
    return identity


def _weights(module: torch.nn.Module) -> _State | None:
    """The current state of the weights; None if torch does not count their changes (inference tensors)."""
    hooking = _hooking(module).values()
    tensors = [tensor for owner in (module, *hooking) for tensor in _tensors(owner)]
    tensors += [tensor for owner in hooking for tensor in _loose_tensors(owner).values()]
    if any(tensor.is_inference() for tensor in tensors):
        return None
    config = getattr(module, "config", None)
    settings = config.to_dict() if config is not None and hasattr(config, "to_dict") else config
    versions = [(id(tensor), tensor._version, tensor.dtype) for tensor in tensors]
    # Not weak references: torch cannot swap a parameter that has one, and some moves to a device swap parameters.
    return tensors, (versions, repr(settings), getattr(module, "use_tiling", False))


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _hooking(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Submodule name -> module whose method replaces its forward, such as a trainer's LoRA layer or extra embedding."""
    return {
        name: owner
        for name, child in module.named_modules()
        if isinstance(owner := getattr(vars(child).get("forward"), "__self__", None), torch.nn.Module)
        and owner is not child
    }


def _replaced_forwards(part: str, module: torch.nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, owner in _hooking(module).items():
        scalars = {
            key: value
            for key, value in vars(owner).items()
            if not key.startswith("_") and key != "training" and isinstance(value, bool | int | float | str)
        }
        loose = {key: _as_json(key, tensor) for key, tensor in _loose_tensors(owner).items()}
        found[name] = [class_name(owner), weights_digest(f"{part}.{name}", owner, None), scalars, loose]
    return found


def _loose_tensors(owner: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors of a module that are neither parameters nor buffers, such as a list of extra embeddings."""
    values = {name: value for name, value in vars(owner).items() if name not in ("_parameters", "_buffers")}
    return dict(named_tensors(values, ""))
