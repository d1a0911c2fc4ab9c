"""The benchmark of texts of natural length runs, and checks the values that it reads. What it measures is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench
SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_ragged.py"


def test_each_way_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--repetitions", "2", "--folder", str(tmp_path)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True, timeout=200)
    result = json.loads(done.stdout)
    assert result["ratio_to_limit"].keys() == {"out", "fresh", "loader"}
    assert all(value > 0 for value in result["us_per_batch"].values()) and result["wanted"] == 1.25
    assert 2 <= result["mean_rows"] < result["mean_rows_padded"] <= 8
    assert list(tmp_path.iterdir()) == []
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
    assert "given tensors" in text and "padded to" in text
