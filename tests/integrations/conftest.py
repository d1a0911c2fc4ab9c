"""What the tests of OneTrainer's module share. Each runs in the host of these tests, and in mgds where it is there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.pipeline_host import host
from helpers.pipeline_sdxl import write_photos

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
