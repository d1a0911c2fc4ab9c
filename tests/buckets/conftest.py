from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from helpers.swift_server import SwiftServer

from latentcache.remote.bucket import Bucket

_numbers = itertools.count()


@pytest.fixture
def s3_url(swift: SwiftServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty place on the server, which the environment leads to."""
    for name, value in swift.environment().items():
        monkeypatch.setenv(name, value)
    return f"s3://tests/{next(_numbers)}/cache"


@pytest.fixture(params=["memory", "files", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    """An empty bucket: of obstore's store in memory, which compares before it replaces, and of two which cannot."""
    from obstore.store import LocalStore, MemoryStore

    if request.param == "memory":
        return Bucket(MemoryStore(), "memory://cache")
    if request.param == "files":
        return Bucket(LocalStore(tmp_path / "bucket", mkdir=True), "files://cache")
    return Bucket.open(request.getfixturevalue("s3_url"))
