"""Trainers, precache and upkeep at once, for some seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]


@pytest.mark.soak
def test_all_at_once(run_soak: Run) -> None:
    result = run_soak("soak_mixed", "--n", 10)
    figures = result["goals"][0]
    assert figures["trainer 1"] and figures["trainer 2"] and figures["precache"]["num_runs"]
