"""A config's file as it is read, unchecked; and how flags and variables change its settings."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from latentcache.errors import ConfigError, StoreError, UnsafeStoreError
from latentcache.part_config import as_list, as_section
from latentcache.utils.durable_files import read_small_file

MAX_BYTES = 1 << 24
"""Of a config's file."""

_READERS: dict[str, Callable[[str], Any]] = {
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
    ".toml": tomllib.loads,
    ".json": json.loads,
}


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML, TOML or JSON file, unchecked. Raises ConfigError."""
    reader = _READERS.get(path.suffix.lower())
    try:
        if reader is None:
            problem = f"unknown suffix {path.suffix!r}; a config ends in {', '.join(_READERS)}"
        elif isinstance(value := reader(_text_of(path)), dict):
            return value
        else:
            problem = f"holds {type(value).__name__}, not settings by name"
    except FileNotFoundError:
        problem = "no such file; configs/ holds complete examples"
    except UnsafeStoreError as error:
        problem = error.detail
    except StoreError as error:
        problem = f"cannot be read: {getattr(error.__cause__, 'strerror', error)}"
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # TOML, JSON and Unicode errors are ValueErrors
        problem = f"is not valid {path.suffix[1:].upper()}: {error}"
    raise ConfigError(problem, source=str(path))


def _text_of(path: Path) -> str:
    # A config may be a link, but it may not be endless.
    return read_small_file(Path(os.path.realpath(path)), MAX_BYTES, "name a config").decode("utf-8-sig")


def from_text(value: Any) -> Any:
    """Text from a flag or a variable. pydantic reads numbers and booleans from text, but has no text for None."""
    return None if isinstance(value, str) and value.lower() in ("null", "none") else value


def merge(settings: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Change these settings, section by section. ConfigError for an item of a list that is not there."""
    for name, value in changes.items():
        if isinstance(value, Mapping):
            if settings.get(name) is None:
                settings[name] = {}
            section = settings[name]
            if isinstance(section, list):
                section = dict(zip(map(str, range(len(section))), section, strict=True))
                if unknown := [number for number in value if not isinstance(section.get(number), dict)]:
                    message = f"{name}: there is no number {unknown[0]!r}; the file has {len(section)}"
                    raise ConfigError(message, key=name)
            if isinstance(section, dict):  # anything else is a fault in the file, which parse_config reports
                merge(section, value)
        else:
            settings[name] = from_text(value)


def merge_datasets(settings: dict[str, Any], changes: Mapping[str, Any], source: str) -> None:
    """As `merge`, of the datasets among the settings, each by its name or its number."""
    datasets = settings.get("datasets")
    if not changes or not isinstance(datasets, list):
        return
    by_name = {d["name"]: d for d in datasets if isinstance(d, dict) and isinstance(d.get("name"), str)}
    by_number = {str(number): d for number, d in enumerate(datasets) if isinstance(d, dict)}
    for which, change in changes.items():
        dataset = by_name.get(which, by_number.get(which))
        if dataset is None:
            known = [*by_name, *by_number]
            raise ConfigError(
                f"--datasets.{which}: no such dataset; there are {', '.join(known)}", source=source, key="datasets"
            )
        # As the schema has them: a file may give one control image without a list, and a mask as a word.
        if "control" in change:
            dataset["control"] = as_list(dataset.get("control", []))
        if "mask" in change:
            dataset["mask"] = as_section(dataset.get("mask"))
        merge(dataset, change)
