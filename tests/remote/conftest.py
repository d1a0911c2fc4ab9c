from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.comparing_server import object_server, s3_url  # noqa: F401 - fixtures
from helpers.far_caches import bucket, far, service  # noqa: F401 - fixtures
from helpers.relay import Relay, relaying
from helpers.remote_samples import make_cache
from helpers.serving import TOKEN, RunningServer, serving_here

from latentcache.config import TOKEN_VARIABLE


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose samples are only read."""
    with serving_here(make_cache(tmp_path_factory.mktemp("served") / "cache"), token=TOKEN) as server:
        yield server


@pytest.fixture
def relay(server: RunningServer) -> Iterator[Relay]:
    """A relay to `server`, which counts requests and may damage answers."""
    with relaying(server.address) as relay:
        yield relay


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    """The token with which `server` is read, also in the environment."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    return TOKEN


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
