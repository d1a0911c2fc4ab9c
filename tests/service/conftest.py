"""A server for each module that only reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from helpers.serving import TOKEN, serving_here
from service_samples import ServedCache, fill


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCache]:
    """A server with both tokens. Tests leave its cache as it was."""
    cache = fill(tmp_path_factory.mktemp("served") / "cache")
    with serving_here(cache.path, token=TOKEN) as server:
        yield replace(cache, server=server)
