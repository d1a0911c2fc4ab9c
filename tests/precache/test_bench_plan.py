"""The benchmark of planning runs. What it measures is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_plan.py"


@pytest.mark.bench
def test_it_runs_at_a_tiny_size(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--repetitions", "1", "--json", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    result = json.loads(done.stdout)
    assert result["replan"].keys() == {"20", "40"}
    for measured in result["replan"].values():
        assert measured.keys() == {"seconds", "peak_memory_mb", "us_per_sample"}
        assert 0 < measured["seconds"]["min"] <= measured["seconds"]["max"]
    assert not list(tmp_path.iterdir())
