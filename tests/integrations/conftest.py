"""What the tests of OneTrainer's module share. Each runs in the host of these tests, and in mgds where it is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.pipeline_host import host
from helpers.pipeline_sdxl import Setup, concept, write_photos

from latentcache.models.tiny import tiny_parts


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return tiny_parts(0)


@pytest.fixture(params=["own", "mgds"])
def pipeline(request: pytest.FixtureRequest) -> SimpleNamespace:
    return host(request.param)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """As many photos as the test's module says: its NUM."""
    return write_photos(tmp_path / "photos", request.module.NUM)


@pytest.fixture
def setup(pipeline: SimpleNamespace, tmp_path: Path, folder: Path, parts: dict[str, Any]) -> Callable[..., Setup]:
    """A setup over the photos, with the same models unless `parts` says otherwise."""

    def make(**changes: Any) -> Setup:
        settings = {"host": pipeline, "cache_dir": tmp_path / "cache", "concepts": [concept(folder)], "parts": parts}
        return Setup(**(settings | changes))

    return make
