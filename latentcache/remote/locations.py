"""What a location names: a cache's directory, a bucket of an object store, or a service."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from latentcache.cache_config import SERVICE_SCHEMES, CacheConfig, location_of

Kind = Literal["directory", "bucket", "service"]


def parse_location(value: str | os.PathLike[str] | CacheConfig) -> tuple[Kind, Path | str]:
    """What kind of place this names, and its path or URL. `file://` is a directory.

    StoreError, which names what is allowed, for another scheme, and for a URL that has a password.
    """
    location = location_of(value)
    return kind_of(location), location


def kind_of(location: Path | str) -> Kind:
    """The kind of what `cache_config.location_of` gave."""
    if isinstance(location, Path):
        return "directory"
    return "service" if location.partition("://")[0] in SERVICE_SCHEMES else "bucket"
