"""The benchmark of the OneTrainer adapter runs, against whichever cache there is to compare with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench
SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_onetrainer.py"


def test_it_runs_at_a_tiny_size() -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--json", "--repetitions", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    result = json.loads(done.stdout)
    assert result["num_samples"] == 6 and ("torch.load" in result["compared_with"] or "mgds" in result["compared_with"])
    for measured in (result["get_item"], result["epoch"]):
        assert measured["seconds_per_sample"].keys() == {"latentcache", "disk_cache"}
        assert measured["speedup"]["min"] > 0
    assert result["warm_start_s"]["first"]["median"] > 0
