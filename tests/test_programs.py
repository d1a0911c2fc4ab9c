"""The benchmarks and the soak programs run at a tiny size. What a benchmark measures is no test; a failed case is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
COLD = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the page cache cannot be dropped here")
PRELOADED = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler named cc"
)


def benchmark(name: str, *parts: str, marks: Any = pytest.mark.bench) -> Any:
    return pytest.param(name, parts, marks=marks, id=" ".join([name, *parts]))


def run(script: str, folder: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), "--tiny", "--folder", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout, done.stderr
    assert not list(folder.iterdir()), "something is left"
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        benchmark("bench_read", "warm", "tier"),
        benchmark("bench_read", "cold", "packs", "wait", marks=[pytest.mark.bench, COLD]),
        benchmark("bench_write"),
        benchmark("bench_precache"),
        benchmark("bench_onetrainer"),
        benchmark("bench_scale"),
    ],
)
def test_a_benchmark_measures_what_it_says(script: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    chosen = ("--part", *parts) if parts else ()
    result = run(script, tmp_path, "--json", "--repetitions", "1", *chosen)
    assert {"cpu", "memory_bytes", "filesystem", "device", "torch", "date"} <= result["environment"].keys()
    assert set(parts) <= result.keys() and "median" in json.dumps(result)


@pytest.mark.bench
def test_each_part_of_the_program_for_a_card_runs_on_the_cpu(tmp_path: Path) -> None:
    result = run("bench_cuda", tmp_path, "--json", "--device", "cpu", "--repetitions", "1")
    parts = {"ceilings", "checks", "vae", "text", "copies", "step", "phases", "decode"}
    assert result["failed"] == {} and result["seconds"].keys() == parts
    assert {row["part"] for row in result["rows"]} == parts and all(row["value"] >= 0 for row in result["rows"])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("script", "part", "figures"),
    [
        pytest.param("soak_crash", "kill", {"killed_writers": 2, "labels": 100, "killed": 10}, marks=PRELOADED),
        pytest.param("soak_crash", "power", {}, marks=PRELOADED),
        pytest.param("soak_crash", "faults", {"typed_errors": 13, "succeeded": 1}, marks=PRELOADED),
        ("soak_rot", "rot", {"refused": 40, "identical": 10, "fixed_as_advised": 1}),
        ("soak_load", "writers", {}),
        ("soak_load", "mixed", {"trainer num_runs": 2, "precache num_runs": 1}),
    ],
)
def test_no_case_of_a_soak_program_fails(script: str, part: str, figures: dict[str, int], tmp_path: Path) -> None:
    result = run(script, tmp_path, "--part", part)
    assert result["failures"] == 0 and result["n"] > 0
    for name, least in figures.items():
        assert sum(goal["figures"].get(name, 0) for goal in result["goals"]) >= least, f"too few cases with {name}"
