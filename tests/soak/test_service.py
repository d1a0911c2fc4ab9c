"""Clients of one server at once, for some seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.soak
def test_clients_at_once(run_soak: Callable[..., dict[str, Any]]) -> None:
    (goal,) = run_soak("soak_service", "--n", 2, "--seconds", 6)["goals"]
    assert goal["num_errors"] == goal["num_wrong"] == 0 and goal["num_changes"] > 0
