"""The section `cache` of a config: where the cache is, and how one elsewhere is used."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal, TypedDict
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, PlainValidator

from latentcache.bucket_config import SECTION
from latentcache.errors import StoreError
from latentcache.families import DEFAULT

TOKEN_VARIABLE, WRITE_TOKEN_VARIABLE = "LATENTCACHE_TOKEN", "LATENTCACHE_WRITE_TOKEN"
"""Of the environment: the token of a service that allows reading, and the one that allows writing too."""

UserPath = Annotated[Path, AfterValidator(Path.expanduser)]
SERVICE_SCHEMES = ("http", "https")
BUCKET_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
"""Of object stores, as obstore takes them."""
HUB = "hf://datasets/"
"""Before USER/NAME, and @REVISION if another one than the newest is meant: a dataset of the Hugging Face hub."""
RETRY_S = 30.0
"""For so long a request is tried again that is not answered."""
ALLOWED = (
    "a directory (also file:///PATH), a bucket (s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or "
    "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX), a service at http://HOST:PORT or https://HOST, or a "
    "dataset of the Hugging Face hub (hf://datasets/USER/NAME), for reading"
)
"""What a location may be, for messages."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SECRETS = re.compile(r"(?<=[:/]).*@|(?<=[?#]).*", re.DOTALL)
_SCHEMES = "|".join(("file", "hf", *SERVICE_SCHEMES, *BUCKET_SCHEMES))
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_MISTYPED = re.compile(rf"(?:{_SCHEMES})(?::|//)|[^/:]+:\d+/?$|$", re.IGNORECASE)
"""A URL that lacks a colon or a slash, HOST:PORT, and nothing: as paths these are directories that nobody means."""


def is_url(value: object) -> bool:
    """Whether the cache is named by a URL, not by a path."""
    return isinstance(value, str) and _SCHEME.match(value) is not None


def cache_location(value: object) -> Path | str:
    """A path, or the URL of a bucket or a service as text. ValueError, which names what is allowed, for the rest."""
    if isinstance(value, Path):
        return value.expanduser()
    scheme = _SCHEME.match(value) if isinstance(value, str) else None
    if isinstance(value, str) and scheme is None:
        if _MISTYPED.match(value):
            raise ValueError(
                f"{_shown(value)}: is no whole URL (a Path keeps one slash after its colon): give a URL as text; a "
                f"directory of this name is ./NAME. A cache is {ALLOWED}"
            )
        return Path(value).expanduser()
    name = "" if scheme is None else scheme[1].lower()
    if scheme is None or name not in ("file", "hf", *SERVICE_SCHEMES, *BUCKET_SCHEMES):
        raise ValueError(f"{_shown(value)}: a cache is {ALLOWED}")
    url = name + scheme.string[len(name) :]
    if name in SERVICE_SCHEMES:
        return url.rstrip("/")
    if name == "hf":
        if not url.startswith(HUB) or _HUB_NAME.fullmatch(url.removeprefix(HUB)) is None:
            raise ValueError(f"{_shown(url)}: a dataset of the hub is hf://datasets/USER/NAME or .../NAME@REVISION")
        return url
    return _of_file(url) if name == "file" else _of_bucket(url)


def _shown(value: object) -> str:
    """The value in a message: without the parts of a URL that may be a password or a signature."""
    return f"{_SECRETS.sub('...', value) if isinstance(value, str) else value!r:.200}"


def _of_file(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise ValueError(f"{_shown(url)}: a file URL has no host and a whole path: file:///PATH")
    return Path(unquote(parts.path))


def _of_bucket(url: str) -> str:
    parts = urlsplit(url)
    # A colon: of a password that has a slash, before which the host ends. No bucket has one.
    if ":" in parts.netloc or (parts.username is not None and not parts.scheme.startswith("abfs")):
        raise ValueError("a URL with a password: credentials of an object store come from the environment")
    if not parts.netloc or parts.query or parts.fragment or ".." in parts.path.split("/"):
        raise ValueError(f"{_shown(url)}: a cache is {ALLOWED}")
    return url.rstrip("/")


# Plain: a union would take JSON's text for neither.
CacheLocation = Annotated[Path | str, PlainValidator(cache_location)]
"""The directory of a cache (a Path), or the URL of a bucket or a service (text)."""


class RemoteOptions(TypedDict, total=False):
    """How a bucket or a service is used: see `CacheConfig`. `token` is by default that of LATENTCACHE_TOKEN."""

    token: str | None
    local: str | Path | None
    local_max_bytes: int | None
    retry_s: float


class CacheConfig(BaseModel):
    """Where the cache is, and which entries may be used."""

    # A path may be a URL into which somebody pasted a password.
    model_config = ConfigDict(**SECTION, hide_input_in_errors=True)

    path: CacheLocation = Path("cache", DEFAULT)
    """Directory of the cache, the URL of a bucket (`s3://BUCKET/PREFIX`, `gs://`, `az://`), or of a service
    (`latentcache serve`). Several datasets, models and runs may share one."""
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
    """Where the cache is elsewhere: a folder of this machine for the packs that are read. Processes may share it.
    Default: one in the user's cache folder (`XDG_CACHE_HOME` or `~/.cache`), of this cache alone."""
    local_max_bytes: Annotated[ByteSize, Field(ge=0)] | None = None
    """Bytes of packs in `local`, e.g. 50GB. Beyond it the longest unused go first. Default: nothing is removed.
    Random order needs the room of all packs that are read: with less, packs are fetched again and again. Pack order
    (`LatentLoader`) does not."""
    retry_s: float = Field(RETRY_S, gt=0, allow_inf_nan=False)
    """Where the cache is a bucket or a service: for so long a request is tried again that is not answered."""

    def remote_options(self) -> RemoteOptions:
        """How a bucket or a service is used. The token is not part of a config: it comes from LATENTCACHE_TOKEN."""
        return RemoteOptions(local=self.local, local_max_bytes=self.local_max_bytes, retry_s=self.retry_s)


def location_of(value: str | os.PathLike[str] | CacheConfig) -> Path | str:
    """The directory (a Path) or the URL (text) that a caller gives. StoreError for what `cache_location` refuses."""
    if isinstance(value, CacheConfig):
        return value.path
    try:
        return cache_location(os.fspath(value))
    except ValueError as error:
        raise StoreError(str(error)) from error
