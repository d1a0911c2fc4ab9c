"""Which of the project's extras installs a package that is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Final

from latentcache.errors import ExtraMissingError

EXTRAS: Final = {
    "encode": (
        "diffusers",
        "transformers",
        "accelerate",
        "huggingface_hub",
        "safetensors",
        "PIL",
    ),
    "plots": ("matplotlib",),
    "cli": ("cyclopts",),
    "service": ("fastapi", "uvicorn", "starlette", "anyio", "jinja2", "prometheus_client"),
    "remote": ("obstore", "urllib3"),
    "parquet": ("pyarrow",),
    "video": ("av",),
    "lora": ("peft",),
    "ray": ("ray",),
}
"""By extra of pyproject.toml, the modules of its packages that the code imports."""


@contextmanager
def naming_extras() -> Iterator[None]:
    """Raise ExtraMissingError, with the `pip install` to run, where an import inside lacks a package of an extra.

    Any other ModuleNotFoundError passes.
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
    """Each installed package that is older than `extra` asks for, as "transformers 4.54.1 (needs >=5.0)"."""
    from packaging.requirements import Requirement  # comes with the encoders; reading does without

    releases = {one.name.lower().replace("_", "-"): one.version for one in metadata.distributions()}
    if "latentcache" not in releases:  # a checkout that was never installed has no requirements
        return []
    found = []
    for needed in map(Requirement, metadata.requires("latentcache") or ()):
        if needed.marker is None or not needed.marker.evaluate({"extra": extra}):
            continue
        release = releases.get(needed.name.lower().replace("_", "-"))
        if release is not None and not needed.specifier.contains(release, prereleases=True):
            found.append(f"{needed.name} {release} (needs {needed.specifier})")
    return found
