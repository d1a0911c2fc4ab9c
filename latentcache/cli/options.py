"""Options of the command line: a flag for each scalar setting of the config, and options that commands share."""

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
"""The settings that `--help` lists first."""


def flags_of(section: type[BaseModel], prefix: str = "") -> type[BaseModel]:
    """Build a model with the section's scalar settings as optional fields. Cyclopts makes a flag of each.

    The help of each flag ends with [type; default]. Flags arrive as text: the schema checks and converts them together
    with the file's settings.
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
    # Cyclopts accepts any name below a dataset. The schema reports the unknown ones.
    config = ConfigDict(extra="allow" if prefix.startswith("datasets.") else "forbid")
    return create_model(f"{section.__name__}Flags", __config__=config, **fields)


if TYPE_CHECKING:
    ConfigFlags = BaseModel
else:
    ConfigFlags = flags_of(Config)
Settings = Annotated[ConfigFlags | None, Parameter(name="*", group=SETTINGS)]
NamedConfig = Annotated[Path | None, Parameter(help="The config that names the cache and the models.")]
# The longer name first: otherwise cyclopts parses it as a key of the shorter one.
_CACHE_NAMES = ("--cache.path", "--cache")
CachePath = Annotated[str | None, Parameter(name=_CACHE_NAMES, help="Directory or URL of the cache.")]
Target = Annotated[str | None, Parameter(help="Directory or URL of the cache, or a config.")]
LocalTarget = Annotated[str | None, Parameter(help="Directory of the cache, or a config. Not a URL.")]
StoredTarget = Annotated[str | None, Parameter(help="Directory of the cache, URL of a bucket, or a config.")]
Switch = Annotated[bool, Parameter(negative="")]
Strict = Annotated[bool, Parameter(negative="", help="Exit with code 1 if anything was refused.")]
Dtype = Literal["float32", "float16", "bfloat16"]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print one JSON document to stdout.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigOptions:
    """Options of every command that takes a config."""

    as_json: AsJson = False
    settings: Settings = None
    """Any setting of the config. Datasets are addressed by name or number."""

    def load(self, path: Path) -> Config:
        """Load a config and apply the flags. Raises ConfigError."""
        if path.is_dir():
            step = f"`latentcache init {shlex.quote(str(path))}` writes one for its images"
            raise ConfigError(f"is a folder, not a config; {step}", source=str(path))
        given = None if self.settings is None else self.settings.model_dump(exclude_none=True)
        return load_config(path, overrides=given)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Options of every command that works on a cache, besides its target."""

    config: NamedConfig = None
    as_json: AsJson = False
    cache_path: CachePath = None

    def named_config(self, target: str | None) -> Config | None:
        """Load the config given as the target or by --config. None if there is none."""
        file = self.config if target is None or _is_place(target) else Path(target)
        if file is not None and not file.exists():
            raise ConfigError("no such cache directory and no such config", source=str(file))
        return None if file is None else load_config(file)

    def cache(self, target: str | None = None) -> CacheConfig:
        """Return the cache to work on: that of the flag, else of the target, else of the config."""
        config, place = self.named_config(target), self.cache_path
        if place is None and target is not None and _is_place(target):
            place = target
        if place is None and config is None:
            raise ConfigError("which cache? Give its directory or URL, or a config")
        settings = CacheConfig() if config is None else config.cache
        return settings if place is None else settings.model_copy(update={"path": location_of(place)})

    def path(self, target: str | None) -> Path:
        """Like `cache`, for a command that works on a directory. Raises RemoteError for a URL."""
        location = self.cache(target).path
        if isinstance(location, str):
            step = "Run it on the machine that serves the cache, with its directory."
            if kind_of(location) != "service":
                step = f"Download it with `latentcache pull {location} DIRECTORY`, and give that directory."
            raise RemoteError(location, "this command needs the directory of the cache", step)
        return location


def _is_place(target: str) -> bool:
    """Whether this is the URL or directory of a cache, rather than a config."""
    return is_url(target) or Path(target).is_dir()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions(CacheOptions):
    """Options of every import."""

    name: str | None = None
    """Name of the manifest. Default: the name of the config's only dataset, else of the format."""
    caption_extension: str = ".txt"
    """Extension of the caption files next to the images."""
    family: str | None = None
    """Model family of the files. Default: derived from the file names."""
    verify: str | None = None
    """Encode this many entries of each kind again, or `all`, and report the differences. Needs --config."""
    no_scale_check: Switch = False
    """Accept latents whose standard deviation is unusual for the family, for example those of another VAE."""
    strict: Strict = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions(CacheOptions):
    """Options of every export."""

    manifest: str | None = None
    """The dataset to export. Default: the only one."""
    unverified: Switch = False
    """Also export imported entries that have not been verified."""
    strict: Strict = False


OfConfig = Annotated[ConfigOptions, Parameter(name="*")]
OfCache = Annotated[CacheOptions, Parameter(name="*")]
CONFIG_DEFAULTS, CACHE_DEFAULTS = ConfigOptions(), CacheOptions()
