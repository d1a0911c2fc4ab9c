"""Fixtures for OneTrainer's module. Each test runs in the tests' own host, and in mgds if it is installed."""

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
    """NUM photos, a constant of the test's module."""
    return write_photos(tmp_path / "photos", request.module.NUM)


@pytest.fixture
def setup(pipeline: SimpleNamespace, tmp_path: Path, folder: Path, parts: dict[str, Any]) -> Callable[..., Setup]:
    """A function that makes a setup over the photos, by default always with the same models."""

    def make(**changes: Any) -> Setup:
        settings = {"host": pipeline, "cache_dir": tmp_path / "cache", "concepts": [concept(folder)], "parts": parts}
        return Setup(**(settings | changes))

    return make
