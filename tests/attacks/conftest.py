"""Limits of an attack, and a folder that no attack may change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from attack_limits import make_outside, unchanged, within_limits

MAX_WAIT_S = 60.0
"""By the clock: the tests of a lane share the processor."""


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """What links out of a cache or a dataset lead to. The test fails if anything there changes."""
    folder = make_outside(tmp_path / "outside")
    with unchanged(folder):
        yield folder


@pytest.fixture
def limited(outside: Path) -> Iterator[None]:
    """The test has 10 s of the processor's time and 256 MiB."""
    with within_limits(max_wait_s=MAX_WAIT_S):
        yield
