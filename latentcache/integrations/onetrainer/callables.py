"""Functions among a module's settings, as JSON: those that put a caption into a chat template, or map a value.

What a function does is its code, the values that it closes over, its defaults, and the globals that it names: of a
module the functions and plain values that it names there, unless the module is installed. Another release of Python
compiles it to other code, so that its values are cached again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

from latentcache.identity import canonical_json, digest

AsJson = Callable[[Any], Any]


def function_json(function: FunctionType, as_json: AsJson, seen: tuple[FunctionType, ...] = ()) -> Any:
    """A function of Python as JSON. `as_json` gives that of a value, and raises for one that has none."""
    if function in seen:
        return {"again": seen.index(function)}  # it calls itself

    used = {name for code in _codes(function.__code__) for name in code.co_names}

    def value(found: Any) -> Any:
        if isinstance(found, FunctionType):
            return function_json(found, as_json, (*seen, function))
        if isinstance(found, ModuleType):
            inside = {name: value(each) for name, each in sorted(_used_of(found, used).items())}
            return {"module": found.__name__, **({"used": inside} if inside else {})}
        if isinstance(found, type | BuiltinFunctionType):
            return {"named": f"{found.__module__}.{found.__qualname__}"}
        return as_json(found)

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
    """What a function with these names may use of a module. Of an installed one nothing: its name stands for it."""
    is_installed = {"site-packages", "dist-packages"} & set(PurePath(getattr(module, "__file__", None) or "").parts)
    if is_installed or module.__name__.partition(".")[0] in sys.stdlib_module_names:
        return {}
    inside = f"{module.__name__}."
    return {
        name: value
        for name, value in vars(module).items()
        if name in names
        and isinstance(value, FunctionType | ModuleType | bool | int | float | str)
        and (not isinstance(value, ModuleType) or value.__name__.startswith(inside))  # others might lead back
    }


def _contents(cell: CellType) -> Any:
    """What a function closes over; the cell where that is not there yet, which is no JSON."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _code_json(code: CodeType) -> list[Any]:
    constants = [_constant(each) for each in code.co_consts if not isinstance(each, CodeType)]
    names = [list(code.co_names), list(code.co_varnames), list(code.co_freevars)]
    return [code.co_code.hex(), constants, names, code.co_argcount, code.co_kwonlyargcount, code.co_flags]


def _constant(value: Any) -> str:
    """The order of a set's members differs from run to run."""
    members = sorted(map(repr, value)) if isinstance(value, frozenset) else value
    return f"{type(value).__name__} {members!r}"
