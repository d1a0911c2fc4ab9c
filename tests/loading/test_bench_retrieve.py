"""The benchmark of reading runs. What it measures is no test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.bench
SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_retrieve.py"
PEERS = {"torch_load", "npz", "safetensors_file", "diskcache_pickle"}


def run(folder: Path, *flags: str) -> dict[str, Any]:
    return json.loads(printed(folder, "--json", *flags))


def printed(folder: Path, *flags: str) -> str:
    command = [sys.executable, str(SCRIPT), "--tiny", "--repetitions", "2", "--folder", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    assert list(folder.iterdir()) == []
    return done.stdout


@pytest.mark.parametrize("flags", [(), ("--one_file",)], ids=["two files", "one file"])
def test_warm(tmp_path: Path, flags: tuple[str, ...]) -> None:
    result = run(tmp_path, *flags)
    assert result["ratio_to_limit"].keys() == result["ratio_to_limit_fresh"].keys() == {"4", "16"}
    for name in ("times_faster", "times_faster_fresh", "times_faster_limit"):
        assert result[name].keys() == PEERS
    assert result["wanted"]["ratio_to_limit"] == {"4": 2.0, "16": 1.35}
    for name in ("ratio_to_limit", "times_faster", "first_epoch", "us_per_sample"):
        assert all(value > 0 for value in result[name].values()), name
    assert result["settings"]["tiny"] and result["environment"]["device"] == "cpu"


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the page cache cannot be dropped here")
def test_cold(tmp_path: Path) -> None:
    cold = run(tmp_path, "--cold")["cold"]
    assert cold["ratio_to_preadv"].keys() == cold["times_faster"].keys() == {"batch", "loader"}
    assert cold["ratio_to_preadv"]["batch"] == cold["spread"]["ratio_to_preadv"]["batch"]["median"] > 0
    assert all(found.keys() == {"torch_load", "safetensors_file"} for found in cold["times_faster"].values())
    ours = {"batch", "batch_never", "loader"}
    assert cold["us_per_sample"].keys() == {*ours, "preadv", "torch_load", "safetensors_file"}
    text = printed(tmp_path, "--cold")
    assert "batch, never asks" in text and "wanted: 3 x torch.load" in text
