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
PEERS = {"torch_load", "npz", "safetensors_file", "diskcache_pickle"}
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
    assert result["ratio_to_limit"].keys() == {"4", "16"}
    for name in ("times_faster", "times_faster_limit"):
        assert result[name].keys() == PEERS
    assert result["wanted"]["ratio_to_limit"] == {"4": 2.0, "16": 1.35}
    for name in ("ratio_to_limit", "times_faster", "first_epoch", "us_per_sample"):
        assert all(value > 0 for value in result[name].values()), name
    assert result["settings"]["tiny"] and result["environment"]["device"] == "cpu"


@COLD
def test_cold_batches(tmp_path: Path) -> None:
    cold = run("bench_retrieve.py", tmp_path, "--cold")["cold"]
    assert cold["ratio_to_preadv"].keys() == cold["times_faster"].keys() == {"batch", "loader"}
    assert cold["ratio_to_preadv"]["batch"] == cold["spread"]["ratio_to_preadv"]["batch"]["median"] > 0
    assert all(found.keys() == {"torch_load", "safetensors_file"} for found in cold["times_faster"].values())
    ours = {"batch", "batch_never", "loader"}
    assert cold["us_per_sample"].keys() == {*ours, "preadv", "torch_load", "safetensors_file"}
    text = printed("bench_retrieve.py", tmp_path, "--cold")
    assert "batch, never asks" in text and "wanted: 3 x torch.load" in text


def test_ragged_batches(tmp_path: Path) -> None:
    result = run("bench_ragged.py", tmp_path)
    assert result["ratio_to_limit"].keys() == {"batch", "loader"}
    assert all(value > 0 for value in result["us_per_batch"].values()) and result["wanted"] == 1.25
    assert 2 <= result["mean_rows"] < result["mean_rows_padded"] <= 8
    text = printed("bench_ragged.py", tmp_path)
    assert "LatentCache.batch" in text and "padded to" in text


@COLD
def test_cold_packs_in_order(tmp_path: Path) -> None:
    result = run("bench_pack_order.py", tmp_path)  # without the peers, which need an environment of their own
    assert result["of_cat"].keys() >= {"packs", "random"} and result["times_faster"].keys() >= {"cat", "random"}
    assert all(value > 0 for value in result["us_per_sample"].values())


def test_how_pack_order_shuffles(tmp_path: Path) -> None:
    apart = run("bench_pack_order.py", tmp_path, "--shuffling")["apart"]
    assert apart["random"]["of_random"] == pytest.approx(1, rel=0.1)
    assert apart["packs"]["packs_in_a_batch"] > 2 and 0 < apart["packs"]["of_random"] < apart["random"]["of_random"]


def test_the_loaders_waits() -> None:
    command = [sys.executable, str(SCRIPTS / "bench_loader.py"), "--tiny", "--json", "--device", "cpu"]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout)
    assert result["steps"].keys() == {"1.25", "4"} and result["settings"]["repetitions"] == 7
    for measured in result["steps"].values():
        shares = measured["wait_share"]
        assert shares.keys() == {"loader", "loader_without_prefetch", "dataloader_0", "dataloader_2"}
        assert all(0 <= share["mean_min"] <= share["mean"] <= share["mean_max"] for share in shares.values())
    assert result["batch_s"] > 0 and result["host_to_device"] is None
