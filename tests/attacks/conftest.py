"""Limits of an attack, and a folder that no attack may change."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from attack_limits import make_outside, unchanged, within_limits


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """What links out of a cache or a dataset lead to. The test fails if anything there changes."""
    folder = make_outside(tmp_path / "outside")
    with unchanged(folder):
        yield folder


@pytest.fixture
def limited(outside: Path) -> Iterator[None]:
    """The test has two minutes and 256 MiB."""
    with within_limits() if sys.platform == "linux" else nullcontext():
        yield
