"""Pytest plugin of the lane `onetrainer-pins`: skips tests of classes that its older releases lack."""

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
"""Messages with which the package or Python reports a missing class."""


def missing(error: BaseException) -> str | None:
    """Return which class an error, or its cause, is about, if the library really lacks it."""
    for pattern in LACKS:
        if match := re.search(pattern, str(error)):
            library = importlib.import_module(match["library"])
            if not hasattr(library, match["name"]):
                return f"{match['library']} {library.__version__} has no {match['name']}"
    cause = error.__cause__ or error.__context__
    return missing(cause) if cause is not None else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """Run the fixtures or the test, and skip it if a class is missing."""
    try:
        return (yield)
    except Exception as error:
        if reason := missing(error):
            pytest.skip(reason)
        raise


pytest_runtest_call = pytest_runtest_setup
