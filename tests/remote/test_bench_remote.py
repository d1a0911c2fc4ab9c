"""The benchmark of the client runs. What it measures is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench
SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_remote.py"


def test_it_runs_at_a_tiny_size() -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--json", "--repetitions", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    result = json.loads(done.stdout)
    assert result["ratio"].keys() == {"local_cache", "local_tier"}
    assert all(0 < ratio["min"] <= ratio["median"] <= ratio["max"] for ratio in result["ratio"].values())
