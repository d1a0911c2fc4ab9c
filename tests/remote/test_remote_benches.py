"""The benchmarks of remote caches run. What they measure is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench
SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize(
    ("script", "ratios"),
    [
        ("bench_remote", {"local_cache", "local_tier"}),
        ("bench_transfer", {"puts", "push", "gets", "gets_to_files", "pull"}),
        ("bench_pack_order_s3", {"gets", "packs"}),
    ],
)
def test_it_runs_at_a_tiny_size(script: str, ratios: set[str]) -> None:
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), "--tiny", "--json", "--repetitions", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    result = json.loads(done.stdout)
    assert result["ratio"].keys() == ratios
    assert all(0 < ratio["min"] <= ratio["median"] <= ratio["max"] for ratio in result["ratio"].values())
