"""The section `cache` of a config: where the cache is, and how a service is used."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from pydantic import AfterValidator, BaseModel, ByteSize, Field, PlainValidator

from latentcache.bucket_config import SECTION
from latentcache.errors import StoreError

TOKEN_VARIABLE, WRITE_TOKEN_VARIABLE = "LATENTCACHE_TOKEN", "LATENTCACHE_WRITE_TOKEN"
"""Of the environment: the token of a service that allows reading, and the one that allows writing too."""

UserPath = Annotated[Path, AfterValidator(Path.expanduser)]
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_COLLAPSED = re.compile(r"https?:/(?!/)")


def is_url(value: object) -> bool:
    """Whether the cache is a service, not a directory."""
    return isinstance(value, str) and _SCHEME.match(value) is not None


def cache_location(value: object) -> Path | str:
    """A path, or the URL of a service as text. ValueError for anything else."""
    if isinstance(value, Path):
        return value.expanduser()
    scheme = _SCHEME.match(value) if isinstance(value, str) else None
    if isinstance(value, str) and scheme is None:
        return Path(value).expanduser()
    if scheme is None or scheme[1] not in ("http", "https"):
        raise ValueError(f"{value!r:.200}: a cache is a directory, or a service at http://HOST:PORT or https://HOST")
    return scheme.string.rstrip("/")


# Plain: a union would take JSON's text for neither.
CacheLocation = Annotated[Path | str, PlainValidator(cache_location)]
"""The directory of a cache (a Path), or the URL of a service (text)."""


class RemoteOptions(TypedDict, total=False):
    """How a service is used: see `CacheConfig`. `token` is by default that of the variable LATENTCACHE_TOKEN."""

    token: str | None
    local: str | Path | None
    local_max_bytes: int | None
    retry_s: float


class CacheConfig(BaseModel):
    """Where the cache is, and which entries may be used."""

    model_config = SECTION

    path: CacheLocation = Path("cache/sdxl")
    """Directory of the cache, or the URL of a service (`latentcache serve`). Several datasets, models and runs may
    share one."""
    store: Literal["disk", "cpu"] = "disk"
    """`disk`: packs on disk. `cpu`: CPU memory of this process only; gone when it ends."""
    salt: str = ""
    """Part of every key. Another salt makes all entries that exist a miss."""
    max_bytes: Annotated[ByteSize, Field(ge=0)] | None = None
    """Bytes of packs, e.g. 50GB or 50GiB. After a run `precache` removes what is beyond: of what no manifest refers to,
    the longest unused first. Default: nothing is removed."""
    unverified: bool = False
    """Train and validate on imported entries too that were not verified."""
    local: UserPath | None = None
    """Where the cache is a service: a directory of this machine that keeps what was read. Processes may share it."""
    local_max_bytes: Annotated[ByteSize, Field(ge=0)] | None = None
    """Bytes of packs in `local`, e.g. 50GB. Beyond it the longest unused go first. Default: nothing is removed.
    Give it the room of a whole epoch: of half an epoch's entries less than a fifth is found again in the next one."""
    retry_s: float = Field(30.0, gt=0, allow_inf_nan=False)
    """Where the cache is a service: for so many seconds a request is tried again when it does not answer."""

    def remote_options(self) -> RemoteOptions:
        """How a service is used. The token is not part of a config: it comes from the variable LATENTCACHE_TOKEN."""
        return RemoteOptions(local=self.local, local_max_bytes=self.local_max_bytes, retry_s=self.retry_s)


def location_of(value: str | os.PathLike[str] | CacheConfig) -> Path | str:
    """The directory (a Path) or the URL (text) that a caller gives. StoreError for a URL that can be no service's."""
    if isinstance(value, CacheConfig):
        return value.path
    text = os.fspath(value)
    if _COLLAPSED.match(text):
        raise StoreError(f"{text}: a path has one slash after its colon; give the URL of a service as text")
    if _SCHEME.match(text) is None:
        return Path(text).expanduser()
    try:
        return cache_location(text)
    except ValueError as error:
        raise StoreError(str(error)) from error
