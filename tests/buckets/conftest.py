from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from helpers.comparing_server import object_server, s3_url  # noqa: F401 - fixtures
from helpers.swift_server import SwiftServer
from obstore.store import MemoryStore

from latentcache.remote.bucket import BucketTransport

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _no_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def swift_url(swift: SwiftServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty place on a real S3 server, which cannot compare. The environment leads to it."""
    for name, value in swift.environment().items():
        monkeypatch.setenv(name, value)
    return f"s3://tests/{next(_numbers)}/cache"


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket in memory; there are others below it."""
    stores: dict[str, MemoryStore] = {}

    def opened(url: str, **_: Any) -> BucketTransport:
        return BucketTransport(stores.setdefault(url, MemoryStore()), url)

    monkeypatch.setattr(BucketTransport, "open", opened)
    return "s3://tests/cache"
