"""Reads and checks config files, applies flags to them, and describes what is wrong with them."""

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
    """Read a config file and apply `overrides`.

    Args:
        path: A YAML, TOML or JSON file.
        overrides: Settings that take precedence over the file, as a nested mapping. `overrides["datasets"]` addresses
            datasets by name or number. Values can be strings, as on the command line.

    Raises:
        ConfigError: The file cannot be read, or settings are unknown, missing or invalid. The message lists them all.
    """
    settings = read_file(Path(path))
    _merge(settings, overrides or {})
    return parse_config(settings, source=f"{path} with flags" if overrides else str(path))


def parse_config(settings: Mapping[str, Any], *, source: str | None = None) -> Config:
    """Check settings against the schema. Raises one ConfigError that lists every problem on a line of its own."""
    return _checked(Config, settings, source)


def parse_buckets(settings: Mapping[str, Any], *, source: str | None = None) -> BucketsConfig:
    """Like `parse_config`, but for the settings of `buckets` alone."""
    return _checked(BucketsConfig, settings, source)


def _checked(section: type[Checked], settings: Mapping[str, Any], source: str | None) -> Checked:
    try:
        return section.model_validate(settings)
    except ValidationError as error:
        raise as_config_error(error, source) from None


def as_config_error(error: ValidationError, source: str | None) -> ConfigError:
    """Convert pydantic's error to a ConfigError with one line per problem."""
    faults = error.errors(include_url=False, include_context=False)
    first = ".".join(str(part) for part in faults[0]["loc"])
    lines = dict.fromkeys(map(_describe, faults))  # a union reports each of its members
    return ConfigError("\n  ".join(lines), source=source, key=first)


def _describe(fault: Mapping[str, Any]) -> str:
    """Describe one validation error: the setting, the value found, what is allowed."""
    # For a union pydantic appends the member's type to the location ("encode.batch_size.constrained-int").
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
    if dotted == "cache":  # a URL given in its place may contain a password: do not repeat it
        return "cache: give settings by name, such as cache: {path: DIRECTORY}"
    return f"{dotted}: {_expected(dotted, fault) or fault['msg']} (got: {fault['input']!r})"


def _expected(dotted: str, fault: Mapping[str, Any]) -> str | None:
    """Return what a setting accepts, or None if pydantic's own message is clear enough."""
    if fault["type"] == "model_type":
        name, given = dotted.split(".")[-1], fault["input"]
        example = f", such as {name}: {{path: {given}}}" if name in ("model", "source") else ""
        return f"give settings by name{example}"
    if fault["type"] == "tuple_type":
        return "give a list" + (" in the file: a flag cannot" if isinstance(fault["input"], str) else "")
    if dotted.endswith("buckets.area") and fault["type"] == "int_parsing":
        return "give a number of pixels, such as 1048576 for 1024x1024"
    if fault["loc"][-1:] != (name := dotted.split(".")[-1],) and name in AUTO_OR_NUMBER:
        return "give 'auto' or a whole number, 1 or more"
    if dotted.endswith("max_bytes"):
        return "give a number of bytes, such as 50GB or 50GiB"
    if dotted.endswith(".name") and fault["type"] == "string_pattern_mismatch":
        return f"use at most 64 letters, digits, - and _, for example {near_name(fault['input']) or 'photos'!r}"
    return None


def near_name(text: str) -> str:
    """Turn a text into a valid dataset name. Empty if it contains no letter or digit."""
    name = re.sub("[^A-Za-z0-9_-]+", "-", text).strip("-_")
    is_reserved = WINDOWS_DEVICE.match(name) or name.lower().startswith(PROMPTS_PREFIX)
    return f"{'my-' if is_reserved else ''}{name}"[:64]


AUTO_OR_NUMBER = ("batch_size", "num_workers", "max_encoders")
"""Settings that accept `auto`: pydantic reports both members of their union, under longer names."""
NOT_NEEDED = dict.fromkeys(("cache_latents", "cache_latents_to_disk"), "; latents are always cached: remove it")
"""Settings of trainers that are not needed here -> why."""


def suggest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for the known word closest to this one, or "" if none is close.

    A setting of the same name in a subsection takes precedence over a similar spelling. The dataset's number is kept,
    and is 0 if the word has none.
    """
    pattern, known = re.sub(r"\b\d+\b", "N", word), list(known)
    section, _, name = pattern.rpartition(".")
    inside = [each for each in known if each.startswith(section) and each.endswith(f".{name}")]
    near = "".join((inside or difflib.get_close_matches(pattern, known, n=1))[:1])
    for number in [*re.findall(r"\b\d+\b", word), *"00"]:
        near = re.sub(r"\bN\b", number, near, count=1)
    return f"; did you mean {near!r}?" if near else ""


def known_settings(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings and sections, with N for the number of a dataset."""
    for name, field in section.model_fields.items():
        child = section_of(field.annotation)
        dotted = f"{prefix}{name}"
        yield dotted
        if child is not None:
            yield from known_settings(child, f"{dotted}.N." if is_list(field.annotation) else f"{dotted}.")


def is_list(annotation: Any) -> bool:
    """Whether a field with this annotation holds several values."""
    if typing.get_origin(annotation) is Annotated:
        return is_list(typing.get_args(annotation)[0])
    return typing.get_origin(annotation) in (tuple, list)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the class of the section, or list of sections, that a field holds. None for a plain value."""
    candidates = (annotation, *typing.get_args(annotation))
    classes = (c for c in candidates if typing.get_origin(c) is None and isinstance(c, type))
    return next((c for c in classes if issubclass(c, BaseModel)), None)


def number_of_bytes(text: str, source: str) -> int:
    """Parse `50GB` (powers of 1000), `50GiB` (powers of 1024) or plain digits. Raises ConfigError."""
    try:
        return int(TypeAdapter(Annotated[ByteSize, Field(ge=0)]).validate_python(text))
    except ValidationError as error:
        message = f"{text!r} is not a size; give for example 50GB, 50GiB or 50000000000"
        raise ConfigError(message, source=source) from error


def is_scalar(annotation: Any) -> bool:
    """Whether a single flag can set the whole value."""
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    members = typing.get_args(annotation) if is_union else (annotation,)
    return section_of(annotation) is None and not any(is_list(member) for member in members)


def type_name(annotation: Any) -> str:
    """Return a type as `--help` and the reference show it: `auto | int`, `list of str`, `float | null`."""
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
    r"'\t'": "A line starts with a tab; indent with spaces.",
    "escape": r"In double quotes \ starts an escape sequence: write 'C:\Users\me' in single quotes, or C:/Users/me.",
}
"""Part of a YAML error's message -> what to do."""


def read_file(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML, TOML or JSON file, without checking its settings. Raises ConfigError."""
    reader = _READERS.get(path.suffix.lower())
    try:
        if reader is None:
            problem = f"unknown extension {path.suffix!r}; a config ends in {', '.join(_READERS)}"
        elif isinstance(value := reader(path.read_text(encoding="utf-8-sig")), dict):
            return value
        else:
            problem = "is empty" if value is None else f"holds a {type(value).__name__}; give settings by name"
    except FileNotFoundError:
        problem = "no such file; `latentcache init PHOTOS` writes a first config, and configs/ has complete examples"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # TOML, JSON and Unicode errors are ValueErrors
        problem = f"is not valid {path.suffix[1:].upper()}: {error}"
        problem += next((f"\n{advice}" for sign, advice in YAML_ADVICE.items() if sign in str(error)), "")
    raise ConfigError(problem, source=str(path))


def _from_text(value: Any) -> Any:
    """Convert a flag's `none` or `null` to None. Pydantic parses numbers and booleans itself."""
    return None if isinstance(value, str) and value.lower() in ("null", "none") else value


def _merge(settings: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Apply changes to settings in place, section by section. Raises ConfigError for a missing list item."""
    for name, value in changes.items():
        if not isinstance(value, Mapping):
            settings[name] = _from_text(value)
            continue
        section = settings.get(name)
        if name == "control":  # the schema accepts a single control image without a list, and `mask: alpha`
            section = as_list(section or [])
        elif name == "mask":
            section = as_section(section)
        settings[name] = section = {} if section is None else section
        if isinstance(section, list):
            _merge_items(name, section, value)
        elif isinstance(section, dict):  # anything else is an error in the file, which parse_config reports
            _merge(section, value)


def _merge_items(name: str, items: list[Any], changes: Mapping[str, Any]) -> None:
    """Apply changes to items of a list of sections, addressed by number or name."""
    known = {str(number): item for number, item in enumerate(items) if isinstance(item, dict)}
    known |= {item["name"]: item for item in known.values() if isinstance(item.get("name"), str)}
    for which, change in changes.items():
        if which not in known:
            message = f"{name}: the file has no {which!r}; it has {', '.join(known) or 'none'}"
            raise ConfigError(message, key=name)
        _merge(known[which], change)
