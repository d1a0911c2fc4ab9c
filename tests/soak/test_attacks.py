"""Some of what can lie in a cache, and of what can be called then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]


@pytest.mark.soak
def test_what_lies_in_a_cache_gives_typed_errors_or_success(run_soak: Run) -> None:
    calls, advice = run_soak("soak_attacks", "--n", 60)["goals"]
    assert calls["n"] == 60 and calls["succeeded"] > calls["refused"] > 0
    assert advice["n"] > 40
