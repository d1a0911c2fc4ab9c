"""How a config's file is read and checked, how flags change its settings, and what is said of a fault."""

from __future__ import annotations

import difflib
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ByteSize, Field, TypeAdapter, ValidationError

from latentcache.config import PROMPTS_PREFIX, WINDOWS_DEVICE, BucketsConfig, Config, as_list, as_section
from latentcache.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib  # novermin
else:
    import tomli as tomllib

_READERS: dict[str, Callable[[str], Any]] = {
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
    ".toml": tomllib.loads,
    ".json": json.loads,
}

Checked = TypeVar("Checked", bound=BaseModel)


def load_config(path: str | Path, *, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a config file and apply `overrides`: a nested mapping, as flags give it.

    Args:
        path: A YAML, TOML or JSON file.
        overrides: Settings by section that beat the file's. In `overrides["datasets"]` a dataset goes by its name or
            its number; values may be text, as flags have them.

    Raises:
        ConfigError: The file cannot be read, or a setting is unknown, missing or not allowed; every fault has a line.
    """
    settings = read_file(Path(path))
    _merge(settings, overrides or {})
    return parse_config(settings, source=f"{path} with flags" if overrides else str(path))


def parse_config(settings: Mapping[str, Any], *, source: str | None = None) -> Config:
    """Check settings against the schema. Every fault is in the one ConfigError, a line each."""
    return _checked(Config, settings, source)


def parse_buckets(settings: Mapping[str, Any], *, source: str | None = None) -> BucketsConfig:
    """Check the settings of buckets alone, as `parse_config` does."""
    return _checked(BucketsConfig, settings, source)


def _checked(section: type[Checked], settings: Mapping[str, Any], source: str | None) -> Checked:
    try:
        return section.model_validate(settings)
    except ValidationError as error:
        raise said(error, source) from None


def said(error: ValidationError, source: str | None) -> ConfigError:
    """Settings that do not fit the schema as an error that has a line for each."""
    faults = error.errors(include_url=False, include_context=False)
    first = ".".join(str(part) for part in faults[0]["loc"])
    lines = dict.fromkeys(map(_describe, faults))  # each member of a union has a fault of its own
    return ConfigError("\n  ".join(lines), source=source, key=first)


def _describe(fault: Mapping[str, Any]) -> str:
    """One validation fault as a sentence: setting, value met, what is allowed."""
    # A union adds its member types to the location ("encode.batch_size.constrained-int"): they name no setting.
    location = [part for part in fault["loc"] if isinstance(part, int) or str(part).isidentifier()]
    dotted = ".".join(str(part) for part in location) or "config"
    if fault["type"] == "extra_forbidden":
        advice = NOT_NEEDED.get(dotted.split(".")[-1]) or suggest(dotted, known_settings())
        return f"{dotted}: unknown setting{advice}"
    if fault["type"] == "missing":
        return f"{dotted}: is required"
    if fault["type"] == "value_error":
        message = str(fault["msg"]).removeprefix("Value error, ")
        return f"{dotted}: {message}" if location else message
    if dotted == "cache":  # a URL in its place may have a password, which is not repeated
        return "cache: give settings by their names, such as cache: {path: DIRECTORY}"
    return f"{dotted}: {_wanted(dotted, fault) or fault['msg']} (met: {fault['input']!r})"


def _wanted(dotted: str, fault: Mapping[str, Any]) -> str | None:
    """What a setting takes, where the schema's own words do not help; None for the others."""
    if fault["type"] == "model_type":
        name, given = dotted.split(".")[-1], fault["input"]
        example = f", such as {name}: {{path: {given}}}" if name in ("model", "source") else ""
        return f"give settings by their names{example}"
    if fault["type"] == "tuple_type":
        return "give a list" + (" in the file; no flag takes one" if isinstance(fault["input"], str) else "")
    if dotted.endswith("buckets.area") and fault["type"] == "int_parsing":
        return "give a number of pixels, such as 1048576 for 1024x1024"
    if fault["loc"][-1:] != (name := dotted.split(".")[-1],) and name in AUTO_OR_NUMBER:
        return "give 'auto' or a whole number from 1"
    if dotted.endswith("max_bytes"):
        return "give a number of bytes, such as 50GB or 50GiB"
    if dotted.endswith(".name") and fault["type"] == "string_pattern_mismatch":
        return f"a name has at most 64 letters, digits, - and _, as {near_name(fault['input'])!r}"
    return None


def near_name(text: str) -> str:
    """The text as a name that a dataset may have; empty where no letter and no digit of it is left."""
    name = re.sub("[^A-Za-z0-9_-]+", "-", text).strip("-_")
    is_reserved = WINDOWS_DEVICE.match(name) or name.lower().startswith(PROMPTS_PREFIX)
    return f"{'my-' if is_reserved else ''}{name}"[:64]


AUTO_OR_NUMBER = ("batch_size", "num_workers", "max_encoders")
"""Where `auto` may stand, each of both kinds has a fault of its own, under a further name."""
NOT_NEEDED = dict.fromkeys(("cache_latents", "cache_latents_to_disk"), "; latents are always cached: remove it")
"""Settings of trainers that have no place here -> why."""


def suggest(word: str, known: Iterable[str]) -> str:
    """The question whether a known word was meant, or "" when none is near.

    That is a setting of this name in a section of the same section, or else the word that is spelled most alike. The
    number of a dataset stays; where the word has none it is 0.
    """
    pattern, known = re.sub(r"\b\d+\b", "N", word), list(known)
    section, _, name = pattern.rpartition(".")
    inside = [each for each in known if each.startswith(section) and each.endswith(f".{name}")]
    near = "".join((inside or difflib.get_close_matches(pattern, known, n=1))[:1])
    for number in [*re.findall(r"\b\d+\b", word), *"00"]:
        near = re.sub(r"\bN\b", number, near, count=1)
    return f"; did you mean {near!r}?" if near else ""


def known_settings(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings and sections; the number of a dataset is written N."""
    for name, field in section.model_fields.items():
        child = section_of(field.annotation)
        dotted = f"{prefix}{name}"
        yield dotted
        if child is not None:
            yield from known_settings(child, f"{dotted}.N." if is_list(field.annotation) else f"{dotted}.")


def is_list(annotation: Any) -> bool:
    """Whether a field of this annotation holds several values."""
    if typing.get_origin(annotation) is Annotated:
        return is_list(typing.get_args(annotation)[0])
    return typing.get_origin(annotation) in (tuple, list)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds (one, or a list of them), or None for a plain value."""
    candidates = (annotation, *typing.get_args(annotation))
    classes = (c for c in candidates if typing.get_origin(c) is None and isinstance(c, type))
    return next((c for c in classes if issubclass(c, BaseModel)), None)


def number_of_bytes(text: str, source: str) -> int:
    """The number that `50GB` (1000 to the power of 3), `50GiB` (1024) or plain digits say. ConfigError."""
    try:
        return int(TypeAdapter(Annotated[ByteSize, Field(ge=0)]).validate_python(text))
    except ValidationError as error:
        message = f"{text!r} is no number of bytes; give e.g. 50GB, 50GiB or 50000000000"
        raise ConfigError(message, source=source) from error


def is_scalar(annotation: Any) -> bool:
    """Whether one flag can give the whole value."""
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    members = typing.get_args(annotation) if is_union else (annotation,)
    return section_of(annotation) is None and not any(is_list(member) for member in members)


def type_name(annotation: Any) -> str:
    """A type as help and the docs show it: `auto | int`, `list of str`, `float | null`."""
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " | ".join(map(str, members))
    if origin in (types.UnionType, typing.Union):
        return " | ".join(type_name(member) for member in members)
    if origin is typing.Annotated:
        return type_name(members[0])
    if origin is tuple:
        return f"list of {type_name(members[0])}"
    if annotation is type(None):
        return "null"
    return {"Path": "path", "ByteSize": "bytes"}.get(annotation.__name__, str(annotation.__name__))


YAML_ADVICE = {
    r"'\t'": "A line begins with a tab; YAML wants spaces.",
    "escape": r"In double quotes YAML reads \ as an escape: write 'C:\Users\me' in single quotes, or C:/Users/me.",
}
"""A sign in the message of a YAML error -> what to do."""


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML, TOML or JSON file, unchecked. Raises ConfigError."""
    reader = _READERS.get(path.suffix.lower())
    try:
        if reader is None:
            problem = f"unknown suffix {path.suffix!r}; a config ends in {', '.join(_READERS)}"
        elif isinstance(value := reader(path.read_text(encoding="utf-8-sig")), dict):
            return value
        else:
            problem = "is empty" if value is None else f"holds {type(value).__name__}, not settings by name"
    except FileNotFoundError:
        problem = "no such file; configs/ holds complete examples, and `latentcache init PHOTOS` writes a first one"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # TOML, JSON and Unicode errors are ValueErrors
        problem = f"is not valid {path.suffix[1:].upper()}: {error}"
        problem += next((f"\n{advice}" for sign, advice in YAML_ADVICE.items() if sign in str(error)), "")
    raise ConfigError(problem, source=str(path))


def _from_text(value: Any) -> Any:
    """Text from a flag. pydantic reads numbers and booleans from text, but has no text for None."""
    return None if isinstance(value, str) and value.lower() in ("null", "none") else value


def _merge(settings: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Change these settings, section by section. ConfigError for an item of a list that is not there."""
    for name, value in changes.items():
        if not isinstance(value, Mapping):
            settings[name] = _from_text(value)
            continue
        section = settings.get(name)
        if name == "control":  # as the schema has them: a file may give one without a list, and a mask as a word
            section = as_list(section or [])
        elif name == "mask":
            section = as_section(section)
        settings[name] = section = {} if section is None else section
        if isinstance(section, list):
            _merge_items(name, section, value)
        elif isinstance(section, dict):  # anything else is a fault in the file, which parse_config reports
            _merge(section, value)


def _merge_items(name: str, items: list[Any], changes: Mapping[str, Any]) -> None:
    """Change items of a list of sections, each by its number, or by its name if it has one."""
    known = {str(number): item for number, item in enumerate(items) if isinstance(item, dict)}
    known |= {item["name"]: item for item in known.values() if isinstance(item.get("name"), str)}
    for which, change in changes.items():
        if which not in known:
            message = f"{name}: there is no {which!r} in the file; it has {', '.join(known) or 'none'}"
            raise ConfigError(message, key=name)
        _merge(known[which], change)
