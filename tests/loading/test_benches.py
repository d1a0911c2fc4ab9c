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


def printed(script: str, folder: Path, *flags: str) -> str:
    repetitions = () if script == "bench_scale.py" else ("--repetitions", "2")
    command = [sys.executable, str(SCRIPTS / script), "--tiny", *repetitions, "--folder", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    assert list(folder.iterdir()) == []
    return done.stdout


def run(script: str, folder: Path, *flags: str) -> dict[str, Any]:
    return json.loads(printed(script, folder, "--json", *flags))


@pytest.mark.parametrize("flags", [(), ("--one_file",)], ids=["two files", "one file"])
def test_warm_batches(tmp_path: Path, flags: tuple[str, ...]) -> None:
    result = run("bench_retrieve.py", tmp_path, *flags)
    assert result["ratio_to_limit"].keys() == result["ratio_to_limit_loader"].keys() == {"4", "16"}
    for name in ("ratio_to_limit", "times_faster", "first_epoch", "us_per_sample"):
        assert all(value > 0 for value in result[name].values()), name


@COLD
def test_cold_batches(tmp_path: Path) -> None:
    cold = run("bench_retrieve.py", tmp_path, "--cold")["cold"]
    assert cold["ratio_to_preadv"].keys() == cold["times_faster"].keys() == {"batch", "loader"}
    assert "batch, never asks" in printed("bench_retrieve.py", tmp_path, "--cold")


def test_ragged_batches(tmp_path: Path) -> None:
    result = run("bench_ragged.py", tmp_path)
    assert result["ratio_to_limit"].keys() == {"batch", "loader"}
    assert 2 <= result["mean_rows"] < result["mean_rows_padded"] <= 8
    assert "padded to" in printed("bench_ragged.py", tmp_path)


@COLD
def test_cold_packs_in_order(tmp_path: Path) -> None:
    result = run("bench_pack_order.py", tmp_path)  # without the peers, which need an environment of their own
    assert result["of_cat"].keys() >= {"packs", "random"} and result["times_faster"].keys() >= {"cat", "random"}


def test_how_pack_order_shuffles(tmp_path: Path) -> None:
    apart = run("bench_pack_order.py", tmp_path, "--shuffling")["apart"]
    assert apart["random"]["of_random"] == pytest.approx(1, rel=0.1)
    assert apart["packs"]["packs_in_a_batch"] > 2 and 0 < apart["packs"]["of_random"] < apart["random"]["of_random"]


def test_the_loaders_waits() -> None:
    command = [sys.executable, str(SCRIPTS / "bench_loader.py"), "--tiny", "--json", "--device", "cpu"]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout)
    assert result["steps"].keys() == {"1.25", "4"} and result["batch_s"] > 0 and result["host_to_device"] is None


def test_the_index_is_measured(tmp_path: Path) -> None:
    report = run("bench_index.py", tmp_path)
    assert len(report["sizes"]) == 2
    for size in report["sizes"]:
        for name, figures in report["results"][str(size)].items():
            if name not in ("build_s", "memory_mb"):
                assert 0 < figures["min"] <= figures["median"] <= figures["max"], name
    assert report["ratio_largest_to_smallest"].keys() == report["results"][str(report["sizes"][0])].keys() - {"build_s"}


def test_large_caches_are_measured(tmp_path: Path) -> None:
    report = run("bench_scale.py", tmp_path)
    assert list(report["steps"]) == ["make_index", "open_index", "make_manifest", "read_manifest", "plan"]
    assert all(figures["seconds"] > 0 and figures["peak_mb"] > 0 for figures in report["steps"].values())
    assert 200 < report["steps"]["make_manifest"]["bytes"] / report["num_samples"] <= 300


def test_writing_is_measured(tmp_path: Path) -> None:
    result = run("bench_write.py", tmp_path)
    assert result["times_faster"].keys() == result["cases"].keys() == {"latents", "samples"}
    for case, by_processes in result["cases"].items():
        assert result["times_faster"][case].keys() == by_processes.keys() == {"1", "2", "4"}
        for figures in by_processes.values():
            durable = {"packs", "files", "files_without_folder"}
            assert figures["us_per_entry"].keys() >= durable
            assert all(0 < f["min"] <= f["median"] <= f["max"] for f in figures["us_per_entry"].values())
