from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import latentcache

pytestmark = pytest.mark.bench
SCRIPT = Path(latentcache.__file__).parents[1] / "scripts" / "bench_index.py"


def test_it_measures_what_it_says(tmp_path):
    command = [sys.executable, str(SCRIPT), "--tiny", "--repetitions", "1", "--json", "--folder", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=True)
    report = json.loads(done.stdout)
    assert len(report["sizes"]) == 2 and list(tmp_path.iterdir()) == []
    for size in report["sizes"]:
        for name, figures in report["results"][str(size)].items():
            if name not in ("build_s", "memory_mb"):
                assert 0 < figures["min"] <= figures["median"] <= figures["max"], name
    assert report["ratio_largest_to_smallest"].keys() == report["results"][str(report["sizes"][0])].keys() - {"build_s"}
