"""Open, read and close at a short size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]


@pytest.mark.soak
def test_nothing_is_left_open(run_soak: Run) -> None:
    run_soak("soak_leaks", "--n", 60)
