"""The benchmark of writing runs. What it measures is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_write.py"


def test_tiny(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--json", "--repetitions", "1", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    result = json.loads(done.stdout)
    assert list(tmp_path.iterdir()) == []
    assert result["times_faster"].keys() == {"latents", "samples"}
    for by_processes in result["times_faster"].values():
        assert by_processes.keys() == {"1", "2", "4"} and all(value > 0 for value in by_processes.values())
    assert result["cases"]["samples"]["2"]["us_per_entry"].keys() == {"packs", "files", "files_without_folder"}
    assert result["growth"]["us_per_entry"].keys() == {"0", "100"}
