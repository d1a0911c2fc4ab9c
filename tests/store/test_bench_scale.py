from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import latentcache

pytestmark = pytest.mark.bench
SCRIPT = Path(latentcache.__file__).parents[1] / "scripts" / "bench_scale.py"


def test_it_makes_what_it_says(tmp_path):
    command = [sys.executable, str(SCRIPT), "--tiny", "--json", "--folder", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=True)
    report = json.loads(done.stdout)
    assert list(report["steps"]) == ["make_index", "open_index", "make_manifest", "read_manifest", "plan"]
    assert all(figures["seconds"] > 0 and figures["peak_mb"] > 0 for figures in report["steps"].values())
    assert 200 < report["steps"]["make_manifest"]["bytes"] / report["num_samples"] <= 300
    assert list(tmp_path.iterdir()) == []
