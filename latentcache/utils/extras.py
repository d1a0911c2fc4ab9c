"""Finds the project's extra that installs a missing package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Final

from latentcache.errors import ExtraMissingError

EXTRAS: Final = {
    "encode": ("diffusers", "transformers", "accelerate", "huggingface_hub", "safetensors", "PIL"),
    "plots": ("matplotlib",),
    "cli": ("cyclopts",),
    "service": ("fastapi", "uvicorn", "starlette", "anyio", "jinja2", "prometheus_client"),
    "remote": ("obstore", "urllib3"),
    "parquet": ("pyarrow",),
    "video": ("av",),
    "lora": ("peft",),
    "ray": ("ray",),
}
"""The modules that the code imports from the packages of each extra in pyproject.toml."""


@contextmanager
def naming_extras() -> Iterator[None]:
    """Turn a failed import of an extra's package into ExtraMissingError, which names the `pip install` to run.

    Any other ModuleNotFoundError propagates.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        for extra, modules in EXTRAS.items():
            if module in modules:
                raise ExtraMissingError(module, extra) from error
        raise


def outdated(extra: str) -> list[str]:
    """Each installed package that is too old for `extra`, as "transformers 4.54.1 (needs >=5.0)"."""
    from packaging.requirements import Requirement  # installed with the encoders; reading must not need it

    releases = {one.name.lower().replace("_", "-"): one.version for one in metadata.distributions()}
    if "latentcache" not in releases:  # a checkout that was never installed lists no requirements
        return []
    found = []
    for needed in map(Requirement, metadata.requires("latentcache") or ()):
        if needed.marker is None or not needed.marker.evaluate({"extra": extra}):
            continue
        release = releases.get(needed.name.lower().replace("_", "-"))
        if release is not None and not needed.specifier.contains(release, prereleases=True):
            found.append(f"{needed.name} {release} (needs {needed.specifier})")
    return found
