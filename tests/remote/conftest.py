from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.comparing_server import object_server, s3_url  # noqa: F401 - fixtures
from helpers.relay import Relay, relaying
from helpers.remote_samples import make_cache
from helpers.serving import RunningServer, serving


@pytest.fixture(scope="session")
def served_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that `server` serves. Its samples are only read; a test that writes adds and removes its own."""
    return make_cache(tmp_path_factory.mktemp("served") / "cache")


@pytest.fixture(scope="session")
def server(served_cache: Path) -> Iterator[RunningServer]:
    with serving(served_cache) as server:
        yield server


@pytest.fixture
def relay(server: RunningServer) -> Iterator[Relay]:
    """A relay to `server`, which counts requests and may damage answers."""
    with relaying(server.address) as relay:
        yield relay


@pytest.fixture(autouse=True)
def _no_token_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LATENTCACHE_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
