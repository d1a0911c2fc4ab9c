"""Bad input at a short size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]


@pytest.mark.soak
@pytest.mark.parametrize("part", ["bombs", "races", "names"])
def test_bad_input_is_refused(run_soak: Run, part: str) -> None:
    run_soak("soak_inputs", "--n", 60, "--only", part)
