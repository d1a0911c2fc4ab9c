"""Fuzz of headers and manifests at a short size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]


@pytest.mark.soak
@pytest.mark.parametrize("target", ["packs", "manifests"])
def test_what_is_changed_gives_only_our_own_errors(run_soak: Run, target: str) -> None:
    result = run_soak("soak_fuzz", "--n", 2000, "--only", target)
    (goal,) = result["goals"]
    assert goal["num_refused"] > goal["num_read"] > 0, "cases must reach the parser, and most must fail there"
