"""Limits of an attack, and a folder outside of the dataset."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from attack_limits import make_outside, within_limits


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    return make_outside(tmp_path / "outside")


@pytest.fixture
def limited() -> Iterator[None]:
    """The test has two minutes and 256 MiB."""
    with within_limits() if sys.platform == "linux" else nullcontext():
        yield
