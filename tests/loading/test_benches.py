"""The benchmarks of reading run, and check the values that they read. What they measure is no test."""

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
    command = [sys.executable, str(SCRIPTS / script), "--tiny", "--repetitions", "2", "--folder", str(folder), *flags]
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
