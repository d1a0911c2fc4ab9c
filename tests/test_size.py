"""The package's size, which each commit may lower and none may raise."""

from __future__ import annotations

from pathlib import Path

import latentcache

MAX_LINES = 36425


def test_the_package_does_not_grow() -> None:
    """A feature that is worth its lines raises the limit in its own commit, which says so."""
    files = Path(latentcache.__file__).parent.rglob("*.py")
    num_lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
    assert num_lines <= MAX_LINES, f"latentcache/ has {num_lines} lines; at most {MAX_LINES} are allowed"
