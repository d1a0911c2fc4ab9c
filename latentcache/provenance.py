"""How an entry was MADE: where, when, from what and with which versions. Never part of the key."""

from __future__ import annotations

import contextlib
import functools
import platform
import socket
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import latentcache

PACKAGES = ("torch", "diffusers", "transformers", "safetensors", "Pillow", "numpy")


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed. Nothing is imported."""
    found = {}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@functools.cache
def software_versions() -> Mapping[str, str]:
    """Versions of Python, latentcache and the installed packages that can affect an entry's value."""
    packages = {name.lower(): text for name, text in installed_versions(PACKAGES).items()}
    return {"python": platform.python_version(), "latentcache": latentcache.__version__, **packages}


def now() -> str:
    """The current time in UTC, ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def provenance_json(**facts: Any) -> dict[str, Any]:
    """The provenance of an entry made now: these facts, without None values, and host, time and versions.

    Precache gives these facts:

    * `sample_id`, `source_path`: the first sample that had these bytes; others may share the entry.
    * `models`: part of the model -> the path or hub id that it was loaded from.
    * `device`, `computed_dtype`: the dtype differs from the identity's after a retry in float32; `note` says why.
    * `float32_precision`: of float32 products, by kind of operator: `ieee`, or `tf32` with a 10-bit mantissa.
    * `num_tokens` of a text, including start and end tokens. Tokens beyond the tokenizer's limit were cut off.
    * `token_limit`: that limit, if it is lower than that of the family's usual tokenizers.
    """
    return {
        **{name: value for name, value in facts.items() if value is not None},
        "host": socket.gethostname(),
        "created": now(),
        "software": dict(software_versions()),
    }
