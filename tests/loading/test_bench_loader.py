"""The benchmark of the loader runs. What it measures is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench
SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_loader.py"
METHODS = {"loader", "loader_without_prefetch", "dataloader_0", "dataloader_2"}


def test_it_runs_at_a_tiny_size() -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--json", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    result = json.loads(done.stdout)
    assert result["steps"].keys() == {"1.25", "4"} and result["settings"]["repetitions"] == 7
    for measured in result["steps"].values():
        assert measured["wait_share"].keys() == METHODS
        assert all(
            0 <= share["mean_min"] <= share["mean"] <= share["mean_max"] for share in measured["wait_share"].values()
        )
    assert result["batch_s"] > 0 and result["host_to_device"] is None
