"""The command line's options: one for each scalar setting of the config, and those that several commands share."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter
from pydantic import BaseModel, ConfigDict, Field, create_model

from latentcache.config import CacheConfig, Config, location_of
from latentcache.config_file import is_list, is_scalar, load_config, section_of, type_name
from latentcache.errors import ConfigError, RemoteError
from latentcache.location import is_url, kind_of

SETTINGS, EVERYDAY = Group("Settings", sort_key=2), Group("Everyday settings", sort_key=1)
EVERYDAY_NAMES = {"cache.path", "model.path", "encode.device", "encode.batch_size", "encode.store_dtype"}
"""The settings that the help lists first."""


def flags_of(section: type[BaseModel], prefix: str = "") -> type[BaseModel]:
    """A model whose fields are the section's scalar settings, all optional: cyclopts makes a flag of each.

    Each one's help ends with [type; default]. Flags are read as text: the schema itself checks and converts them, in
    one place for files and flags.
    """
    fields: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        child, dotted = section_of(field.annotation), f"{prefix}{name}"
        if child is not None:
            flags: Any = flags_of(child, f"{dotted}.")
            fields[name] = ((dict[str, flags] if is_list(field.annotation) else flags) | None, None)
        elif is_scalar(field.annotation):
            default = "required" if field.is_required() else json.dumps(field.default, default=str).strip('"')
            described = f"{field.description or ''} [{type_name(field.annotation)}; {default}]"
            group = EVERYDAY if dotted in EVERYDAY_NAMES else SETTINGS
            fields[name] = (Annotated[str | None, Parameter(group=group)], Field(None, description=described))
    # cyclopts lets all settings of a dataset pass, by whatever name: the schema names those that it does not know.
    config = ConfigDict(extra="allow" if prefix.startswith("datasets.") else "forbid")
    return create_model(f"{section.__name__}Flags", __config__=config, **fields)


if TYPE_CHECKING:
    ConfigFlags = BaseModel
else:
    ConfigFlags = flags_of(Config)
Settings = Annotated[ConfigFlags | None, Parameter(name="*", group=SETTINGS)]
NamedConfig = Annotated[Path | None, Parameter(help="A config: it names the cache, and the models.")]
# The longer name first: cyclopts would take it for a key of the shorter one.
_CACHE_NAMES = ("--cache.path", "--cache")
CachePath = Annotated[str | None, Parameter(name=_CACHE_NAMES, help="The cache's directory, or its URL.")]
Target = Annotated[str | None, Parameter(help="The cache's directory, its URL, or a config.")]
LocalTarget = Annotated[str | None, Parameter(help="The cache's directory, or a config: no URL.")]
StoredTarget = Annotated[str | None, Parameter(help="The cache's directory, the URL of a bucket, or a config.")]
Switch = Annotated[bool, Parameter(negative="")]
Strict = Annotated[bool, Parameter(negative="", help="Make the exit code 1 also where something is refused.")]
Dtype = Literal["float32", "float16", "bfloat16"]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="One JSON document on stdout.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigOptions:
    """What every command about a config takes."""

    as_json: AsJson = False
    settings: Settings = None
    """Any setting of the config; a dataset goes by its name or number."""

    def load(self, path: Path) -> Config:
        """The config in a file, with the settings that were given as flags. Raises ConfigError."""
        if path.is_dir():
            message = (
                f"is a folder, not a config; `latentcache init {shlex.quote(str(path))}` writes one for its images"
            )
            raise ConfigError(message, source=str(path))
        given = None if self.settings is None else self.settings.model_dump(exclude_none=True)
        return load_config(path, overrides=given)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """What every command about a cache takes, next to its target."""

    config: NamedConfig = None
    as_json: AsJson = False
    cache_path: CachePath = None

    def named_config(self, target: str | None) -> Config | None:
        """The config that a command names, as its target or by --config; None where it names none."""
        file = self.config if target is None or _is_place(target) else Path(target)
        if file is not None and not file.exists():
            raise ConfigError("no such cache directory and no such config", source=str(file))
        return None if file is None else load_config(file)

    def cache(self, target: str | None = None) -> CacheConfig:
        """The cache that a command is about: a flag, else the target, else the config."""
        config, place = self.named_config(target), self.cache_path
        if place is None and target is not None and _is_place(target):
            place = target
        if place is None and config is None:
            raise ConfigError("which cache? Give its directory, a config, or --cache.path")
        settings = CacheConfig() if config is None else config.cache
        return settings if place is None else settings.model_copy(update={"path": location_of(place)})

    def path(self, target: str | None) -> Path:
        """As `cache`, for a command that works on a directory. RemoteError, with the next step, for a URL."""
        location = self.cache(target).path
        if isinstance(location, str):
            step = "Run it on the machine that serves the cache, and name the directory."
            if kind_of(location) != "service":
                step = f"`latentcache pull {location} DIRECTORY` brings it there; then name the directory."
            raise RemoteError(location, "this command works on the cache's own directory", step)
        return location


def _is_place(target: str) -> bool:
    """Whether it is a cache's URL or directory, and no config."""
    return is_url(target) or Path(target).is_dir()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions(CacheOptions):
    """What an import does with the entries."""

    name: str | None = None
    """Name of the manifest. Default: that of the config's only dataset, else that of the format."""
    caption_extension: str = ".txt"
    """Suffix of the caption files next to the images."""
    family: str | None = None
    """The model family of the files. Default: the one that their names say."""
    verify: str | None = None
    """Encode so many entries of each kind again, or `all`, and report how they differ. Needs --config."""
    no_scale_check: Switch = False
    """Do not compare the latents' standard deviation with the family's: they are of another VAE."""
    strict: Strict = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions(CacheOptions):
    """The cache and the dataset that are exported."""

    manifest: str | None = None
    """The dataset. Default: the only one."""
    unverified: Switch = False
    """Also export entries that were imported and not verified."""
    strict: Strict = False


OfConfig = Annotated[ConfigOptions, Parameter(name="*")]
OfCache = Annotated[CacheOptions, Parameter(name="*")]
CONFIG_DEFAULTS, CACHE_DEFAULTS = ConfigOptions(), CacheOptions()
