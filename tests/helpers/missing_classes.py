"""Skips a test that needs a class which the installed diffusers or transformers does not have yet.

For the lane `onetrainer-pins` of scripts/test.py, whose releases are older than the newest families. It is a plugin of
that lane alone: in the others such a test fails.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Generator

import pytest

LACKS = (
    r"(?P<library>diffusers|transformers) [\w.]+ has no (?P<name>\w+), which this model needs",
    r"module '?(?P<library>diffusers|transformers)'? has no attribute '?(?P<name>\w+)",
    r"cannot import name '(?P<name>\w+)' from '(?P<library>diffusers|transformers)'",
)
"""How the package and Python say that a library has no class of this name."""


def missing(error: BaseException) -> str | None:
    """The class that this error, or one that it came from, is about, where its library really has none of this name."""
    for pattern in LACKS:
        if match := re.search(pattern, str(error)):
            library = importlib.import_module(match["library"])
            if not hasattr(library, match["name"]):
                return f"{match['library']} {library.__version__} has no {match['name']}"
    cause = error.__cause__ or error.__context__
    return missing(cause) if cause is not None else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """Run the fixtures, or the test, and skip it where a class is missing."""
    try:
        return (yield)
    except Exception as error:
        if reason := missing(error):
            pytest.skip(reason)
        raise


pytest_runtest_call = pytest_runtest_setup
