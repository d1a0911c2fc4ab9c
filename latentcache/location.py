"""Locations of caches: a directory, an object store, a service, or a dataset on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import PlainValidator

from latentcache.utils.durable_files import expanded

Kind = Literal["directory", "bucket", "service", "hub"]
SERVICE_SCHEMES = ("http", "https")
BUCKET_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
"""URL schemes of object stores, as obstore accepts them."""
HUB = "hf://datasets/"
"""Prefix of a dataset on the Hugging Face hub. USER/NAME follows, optionally with @REVISION."""
ALLOWED = (
    "a directory (also file:///PATH), a bucket (s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or "
    "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX), a service at http://HOST:PORT or https://HOST, or a "
    "dataset on the Hugging Face hub (hf://datasets/USER/NAME, read-only)"
)
"""The valid locations, for messages."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SECRETS = re.compile(r"(?<=[:/]).*@|(?<=[?#]).*", re.DOTALL)
_SCHEMES = "|".join(("file", "hf", *SERVICE_SCHEMES, *BUCKET_SCHEMES))
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_MISTYPED = re.compile(rf"(?:{_SCHEMES})(?::|//)|[^/:]+:\d+/?$|$", re.IGNORECASE)
"""A URL without a colon or a slash, HOST:PORT, or an empty string: valid paths, but not meant as such."""


def is_url(value: object) -> bool:
    """Whether a location is a URL, not a path."""
    return isinstance(value, str) and _SCHEME.match(value) is not None


def kind_of(location: Path | str) -> Kind:
    """The kind of a location that `cache_location` returned."""
    if isinstance(location, Path):
        return "directory"
    if location.startswith(HUB):
        return "hub"
    return "service" if location.partition("://")[0] in SERVICE_SCHEMES else "bucket"


def cache_location(value: object) -> Path | str:
    """Parse a location into a Path, or a URL as text. ValueError, which lists what is allowed, for anything else."""
    if isinstance(value, Path):
        return expanded(value)
    scheme = _SCHEME.match(value) if isinstance(value, str) else None
    if isinstance(value, str) and scheme is None:
        if _MISTYPED.match(value):
            raise ValueError(
                f"{_shown(value)!r} is not a complete URL: give a URL as text, since a Path drops a slash. For a "
                f"directory of this name use ./NAME. A cache is {ALLOWED}"
            )
        return expanded(value)
    name = "" if scheme is None else scheme[1].lower()
    if scheme is None or name not in ("file", "hf", *SERVICE_SCHEMES, *BUCKET_SCHEMES):
        raise ValueError(f"{_shown(value)}: a cache is {ALLOWED}")
    url = name + scheme.string[len(name) :]
    if name in SERVICE_SCHEMES:
        return url.rstrip("/")
    if name == "hf":
        if not url.startswith(HUB) or _HUB_NAME.fullmatch(url.removeprefix(HUB)) is None:
            raise ValueError(f"{_shown(url)}: a dataset on the hub is hf://datasets/USER/NAME or .../NAME@REVISION")
        return url
    return _of_file(url) if name == "file" else _of_bucket(url)


def _shown(value: object) -> str:
    """The value for a message, without parts of a URL that may be a password or a signature."""
    return f"{_SECRETS.sub('...', value) if isinstance(value, str) else value!r:.200}"


def _of_file(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise ValueError(f"{_shown(url)}: a file URL has an absolute path and no host: file:///PATH")
    return Path(unquote(parts.path))


def _of_bucket(url: str) -> str:
    parts = urlsplit(url)
    # A colon may belong to a password with a slash, where parsing ends the host. Bucket names have no colon.
    if ":" in parts.netloc or (parts.username is not None and not parts.scheme.startswith("abfs")):
        raise ValueError("the URL has a password, but credentials of an object store come from the environment")
    if not parts.netloc or parts.query or parts.fragment or ".." in parts.path.split("/"):
        raise ValueError(f"{_shown(url)}: a cache is {ALLOWED}")
    return url.rstrip("/")


# A plain validator, since a union would accept JSON's text for neither type.
CacheLocation = Annotated[Path | str, PlainValidator(cache_location)]
"""The directory of a cache (a Path), or a URL (text)."""
