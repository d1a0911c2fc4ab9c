"""Processes that add the same entries at once, and workers that read them, at a short size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.soak
def test_each_entry_is_encoded_once_and_stored_once(run_soak: Callable[..., dict[str, Any]]) -> None:
    run_soak("soak_writers", "--n", 60)
