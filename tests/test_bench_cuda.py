"""The program for a real card runs, here at a tiny size on the CPU. What it measures is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench
SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_cuda.py"


def test_each_part_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--device", "cpu", "--json", "--repetitions", "1"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], capture_output=True, text=True, cwd=tmp_path, timeout=280
    )
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert done.returncode == 0 and result["failed"] == {}, done.stderr
    parts = {row["part"] for row in result["rows"]}
    assert (
        parts
        == set(result["seconds"])
        == {
            *("ceilings", "checks", "vae", "text", "copies", "step", "phases", "decode"),
        }
    )
    assert all(row["value"] >= 0 for row in result["rows"])
    assert not list(tmp_path.iterdir()), "nothing is left"


def test_without_an_accelerator_real_sizes_are_refused() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--device", "cpu"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--tiny --device cpu" in done.stderr
