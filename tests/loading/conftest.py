from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.photo_files import write_photos
from loading import config_of

from latentcache import LatentCache
from latentcache.precache.run import run_precache


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of five flipped photos in two buckets, with 2 repeats; one has two captions, another none."""
    folder = tmp_path_factory.mktemp("loading")
    write_photos(folder / "photos")
    run_precache(config_of(folder))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of the photos and their cache for this test; `config_of` returns their config."""
    return shutil.copytree(made, tmp_path / "own")


@pytest.fixture
def path(folder: Path) -> Path:
    """The cache of `folder`: moments and embeddings in float32."""
    return folder / "cache"


@pytest.fixture
def cache(path: Path) -> Iterator[LatentCache]:
    """The open cache at `path`, a fixture that a test module may override."""
    with LatentCache(path) as cache:
        yield cache
