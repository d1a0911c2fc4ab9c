"""The benchmark of runs on Ray. What it measures is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench
SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_ray.py"


def test_it_runs_at_a_tiny_size() -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--json", "--repetitions", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    result = json.loads(done.stdout)
    assert 0 < result["times_of_one"]["median"] < 10 and result["num_encoders"] == 2
    assert result["gap_ms"]["median"] > 0 and result["nothing_s"]["median"] > 0
    assert result["num_started"] == 0, "with nothing to do no encoder is started"
