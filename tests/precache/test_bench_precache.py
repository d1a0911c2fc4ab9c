"""The benchmark of precaching runs, also its full-size part. What it measures is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench
SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_precache.py"


def test_it_runs_at_a_tiny_size() -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--json", "--full_size", "--device", "cpu", "--repetitions", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    result = json.loads(done.stdout)
    for figure in ("fraction_of_ceiling", "fraction_of_decode_ceiling", "captions_fraction_of_ceiling"):
        assert 0 < result[figure] < 2, figure
    assert result["times_one_at_a_time"] > 0
    assert result["encoder_bound"]["num_images"] == 3 and result["captions"]["num_captions"] == 6, "and the empty one"
    gains = result["settings_of_encoders"]
    assert gains["matmul_flops"] > 0
    assert {"plain, batch 1", "plain, batch 2", "channels_last, batch 2"} <= gains["images"].keys()
    assert {"sdpa, batch 1", "eager attention, batch 2"} <= gains["captions"].keys()
    assert all(variant["per_s"] > 0 for kind in ("images", "captions") for variant in gains[kind].values())
