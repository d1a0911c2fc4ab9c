"""One server for the modules that only read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from helpers.serving import serving
from service_samples import ServedCache, fill


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCache]:
    """A server with both tokens. Tests leave its cache as it was."""
    cache = fill(tmp_path_factory.mktemp("served") / "cache")
    with serving(cache.path) as server:
        yield replace(cache, server=server)
