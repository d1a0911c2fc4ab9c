from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import latentcache

pytestmark = pytest.mark.bench
SCRIPT = Path(latentcache.__file__).parents[1] / "scripts" / "bench_service.py"


def test_it_measures_what_it_says(tmp_path):
    command = [sys.executable, str(SCRIPT), "--tiny", "--repetitions", "1", "--json", "--folder", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=True)
    report = json.loads(done.stdout)
    assert list(tmp_path.iterdir()) == []
    for found in report["throughput"].values():
        for name in ("read_mb_per_s", "constant_mb_per_s", "ratio"):
            assert 0 < found[name]["min"] <= found[name]["median"] <= found[name]["max"], name
    memory = report["memory"]
    assert memory["num_requests"] > 0 and memory["failures"] == []
    assert memory["peak_over_empty_mb"]["resident"] >= memory["peak_over_empty_mb"]["anonymous"] > 0
