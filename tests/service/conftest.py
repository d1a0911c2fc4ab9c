"""A server for each module whose tests can share one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.remote_samples import fill
from helpers.serving import TOKEN, RunningServer, serving_here


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of twelve samples, with both tokens. Tests may add to its cache, and leave these samples as they are."""
    with serving_here(fill(tmp_path_factory.mktemp("served") / "cache", range(12)), token=TOKEN) as server:
        yield server
