from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from loading import make_cache


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cache(tmp_path_factory.mktemp("loading"))


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    """A cache of this test's own: moments in float32, embeddings too, flips, two captions of one sample."""
    return shutil.copytree(made, tmp_path / "cache")
