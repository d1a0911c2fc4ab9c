"""The benchmarks of the store and of reading run, and check what they read. What they measure is no test."""

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
COLD = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the page cache cannot be dropped here")


def run(script: str, folder: Path, *flags: str) -> dict[str, Any]:
    repetitions = () if script == "bench_scale.py" else ("--repetitions", "2")
    command = [sys.executable, str(SCRIPTS / script), "--tiny", "--json", *repetitions, "--folder", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    assert list(folder.iterdir()) == []
    return json.loads(done.stdout)


def numbers_in(value: Any) -> list[float]:
    """The figures of a result, wherever they are nested."""
    if isinstance(value, dict):
        return [number for each in value.values() for number in numbers_in(each)]
    return [value] if isinstance(value, int | float) else []


@pytest.mark.parametrize(
    ("script", "flags", "names"),
    [
        ("bench_retrieve", (), {"ratio_to_limit", "ratio_to_limit_loader", "times_faster", "first_epoch"}),
        ("bench_retrieve", ("--one_file",), {"ratio_to_limit", "ratio_to_limit_loader"}),
        pytest.param("bench_retrieve", ("--cold",), {"cold"}, marks=COLD),
        ("bench_ragged", (), {"ratio_to_limit"}),
        # Without the peers, which need an environment of their own.
        pytest.param("bench_pack_order", (), {"of_cat", "times_faster"}, marks=COLD),
        ("bench_index", (), {"results", "ratio_largest_to_smallest"}),
        ("bench_write", (), {"times_faster", "cases"}),
    ],
)
def test_it_runs_at_a_tiny_size(tmp_path: Path, script: str, flags: tuple[str, ...], names: set[str]) -> None:
    result = run(f"{script}.py", tmp_path, *flags)
    assert result.keys() >= names
    assert all(number > 0 for name in names for number in numbers_in(result[name]))


def test_how_pack_order_shuffles(tmp_path: Path) -> None:
    apart = run("bench_pack_order.py", tmp_path, "--shuffling")["apart"]
    assert apart["random"]["of_random"] == pytest.approx(1, rel=0.1)
    assert apart["packs"]["packs_in_a_batch"] > 2 and 0 < apart["packs"]["of_random"] < apart["random"]["of_random"]


def test_the_loaders_waits() -> None:
    command = [sys.executable, str(SCRIPTS / "bench_loader.py"), "--tiny", "--json", "--device", "cpu"]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout)
    assert result["steps"].keys() == {"1.25", "4"} and result["batch_s"] > 0 and result["host_to_device"] is None


def test_large_caches_are_measured(tmp_path: Path) -> None:
    report = run("bench_scale.py", tmp_path)
    assert list(report["steps"]) == ["make_index", "open_index", "make_manifest", "read_manifest", "plan"]
    assert all(figures["seconds"] > 0 and figures["peak_mb"] > 0 for figures in report["steps"].values())
    assert 200 < report["steps"]["make_manifest"]["bytes"] / report["num_samples"] <= 300
