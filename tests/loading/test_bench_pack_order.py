"""The benchmark of pack order runs. What it measures is no test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench
ROOT = Path(__file__).parents[2]


def run(folder: Path, *flags: str) -> dict:
    command = [sys.executable, str(ROOT / "scripts" / "bench_pack_order.py"), "--tiny", "--json", "--repetitions", "2"]
    command += ["--folder", str(folder), *flags]  # without the peers, which need an environment of their own
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    assert list(folder.iterdir()) == []
    return json.loads(done.stdout)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the page cache cannot be dropped here")
def test_cold(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result["of_cat"].keys() >= {"packs", "random"} and result["times_faster"].keys() >= {"cat", "random"}
    assert all(value > 0 for value in result["us_per_sample"].values())


def test_shuffling(tmp_path: Path) -> None:
    apart = run(tmp_path, "--shuffling")["apart"]
    assert apart["random"]["of_random"] == pytest.approx(1, rel=0.1)
    assert apart["packs"]["packs_in_a_batch"] > 2 and 0 < apart["packs"]["of_random"] < apart["random"]["of_random"]
