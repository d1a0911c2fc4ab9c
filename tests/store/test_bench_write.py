"""The benchmark of writing at a tiny size. What it measures is no test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_writing_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "bench_write.py"), "--tiny", "--repetitions", "1", "--json"]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=200, env=environment, check=True
    )
    result = json.loads(done.stdout)
    assert list(tmp_path.iterdir()) == []
    assert result["times_faster"].keys() == result["cases"].keys() == {"latents", "samples"}
    for case, by_processes in result["cases"].items():
        assert result["times_faster"][case].keys() == by_processes.keys() == {"1", "2", "4"}
        for num_processes, measured in by_processes.items():
            durable = {"packs", "files", "files_without_folder"}
            peers = {"torch_save", "diskcache_pickle"} if num_processes == "1" else set()
            assert measured["us_per_entry"].keys() == durable | peers
            assert measured["times_faster"].keys() == (durable | peers) - {"packs"}
            assert all(0 < f["min"] <= f["median"] <= f["max"] for f in measured["us_per_entry"].values())
    assert result["growth"]["us_per_entry"].keys() == {"0", "100"}
