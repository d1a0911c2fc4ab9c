"""Where a cache is: a directory, an object store, a service, or a dataset of the Hugging Face hub."""

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
"""Of object stores, as obstore takes them."""
HUB = "hf://datasets/"
"""Before USER/NAME, and @REVISION if another one than the newest is meant: a dataset of the Hugging Face hub."""
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


def kind_of(location: Path | str) -> Kind:
    """The kind of what `cache_location` gave."""
    if isinstance(location, Path):
        return "directory"
    if location.startswith(HUB):
        return "hub"
    return "service" if location.partition("://")[0] in SERVICE_SCHEMES else "bucket"


def cache_location(value: object) -> Path | str:
    """A path, or the URL of a bucket or a service as text. ValueError, which names what is allowed, for the rest."""
    if isinstance(value, Path):
        return expanded(value)
    scheme = _SCHEME.match(value) if isinstance(value, str) else None
    if isinstance(value, str) and scheme is None:
        if _MISTYPED.match(value):
            raise ValueError(
                f"{_shown(value)}: is no whole URL (a Path keeps one slash after its colon): give a URL as text; a "
                f"directory of this name is ./NAME. A cache is {ALLOWED}"
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
