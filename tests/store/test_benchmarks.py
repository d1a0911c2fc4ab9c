"""The benchmarks of the store at a tiny size. What they measure is no test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.bench

SCRIPTS = Path(__file__).parents[2] / "scripts"


def measured(name: str, folder: Path, *options: str) -> Any:
    """The document of a benchmark, which leaves nothing in the folder."""
    command = [sys.executable, str(SCRIPTS / name), "--tiny", "--json", "--folder", str(folder), *options]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=True)
    assert list(folder.iterdir()) == []
    return json.loads(done.stdout)


def test_the_index_is_measured(tmp_path: Path) -> None:
    report = measured("bench_index.py", tmp_path, "--repetitions", "1")
    assert len(report["sizes"]) == 2
    for size in report["sizes"]:
        for name, figures in report["results"][str(size)].items():
            if name not in ("build_s", "memory_mb"):
                assert 0 < figures["min"] <= figures["median"] <= figures["max"], name
    assert report["ratio_largest_to_smallest"].keys() == report["results"][str(report["sizes"][0])].keys() - {"build_s"}


def test_large_caches_are_measured(tmp_path: Path) -> None:
    report = measured("bench_scale.py", tmp_path)
    assert list(report["steps"]) == ["make_index", "open_index", "make_manifest", "read_manifest", "plan"]
    assert all(figures["seconds"] > 0 and figures["peak_mb"] > 0 for figures in report["steps"].values())
    assert 200 < report["steps"]["make_manifest"]["bytes"] / report["num_samples"] <= 300


def test_writing_is_measured(tmp_path: Path) -> None:
    result = measured("bench_write.py", tmp_path, "--repetitions", "1")
    assert result["times_faster"].keys() == result["cases"].keys() == {"latents", "samples"}
    for case, by_processes in result["cases"].items():
        assert result["times_faster"][case].keys() == by_processes.keys() == {"1", "2", "4"}
        for figures in by_processes.values():
            durable = {"packs", "files", "files_without_folder"}
            assert figures["us_per_entry"].keys() >= durable
            assert all(0 < f["min"] <= f["median"] <= f["max"] for f in figures["us_per_entry"].values())
