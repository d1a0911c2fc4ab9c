"""The command line's flags: one for each scalar setting of the config, and those that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from pydantic import BaseModel, ConfigDict, Field, create_model

from latentcache.config import Config, is_list, is_scalar, section_of


def flags_of(section: type[BaseModel]) -> type[BaseModel]:
    """A model whose fields are the section's scalar settings, all optional: cyclopts makes a flag of each.

    Flags are read as text: the schema itself checks and converts them, in one place for file, variable and flag.
    """
    fields: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        child = section_of(field.annotation)
        if child is not None and is_list(field.annotation):
            fields[name] = (dict[str, flags_of(child)] | None, None)  # type: ignore[misc]
        elif child is not None:
            fields[name] = (flags_of(child) | None, None)
        elif is_scalar(field.annotation):
            fields[name] = (str | None, Field(None, description=field.description))
    return create_model(f"{section.__name__}Flags", __config__=ConfigDict(extra="forbid"), **fields)


Settings = Annotated[flags_of(Config) | None, Parameter(name="*", group="Settings")]  # type: ignore[valid-type]
CachePath = Annotated[Path | None, Parameter(name="--cache.path", help="The cache's directory.")]
Target = Annotated[Path | None, Parameter(help="The cache's directory, or a config.")]
NamedConfig = Annotated[Path | None, Parameter(help="A config that names the cache.")]
Switch = Annotated[bool, Parameter(negative="")]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="One JSON document on stdout.")]
