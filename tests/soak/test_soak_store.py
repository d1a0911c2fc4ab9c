"""Crash, power loss, bit rot and faults at a short size: no case fails, and there were cases of each sort."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.soak
needs_preloading = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler named cc"
)

Run = Callable[..., dict[str, Any]]


@needs_preloading
def test_kills(run_soak: Run) -> None:
    instants, labelled = run_soak("soak_kill", "--n", 6)["goals"]
    assert instants["n"] == 6 and instants["killed_writers"] > 2
    assert labelled["labels"] > 100 and labelled["killed"] > 10


@needs_preloading
def test_power_cuts(run_soak: Run) -> None:
    assert run_soak("soak_power", "--n", 4)["n"] == 4 * 7


@needs_preloading
def test_faults(run_soak: Run) -> None:
    faults = run_soak("soak_faults", "--n", 1, "--operations", "add", "read", "compact")["goals"][0]
    assert faults["typed_errors"] > faults["n"] / 2 and faults["succeeded"] > 0


def test_bit_rot(run_soak: Run) -> None:
    flips, bursts, lengths, exchanges, index = run_soak("soak_rot", "--n", 100)["goals"]
    assert flips["n"] == 100 and flips["refused"] > 30 and flips["identical"] > 10
    for goal in (bursts, lengths, exchanges):
        assert goal["refused"] > 0
    assert index["n"] == 3
