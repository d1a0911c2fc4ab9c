from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import latentcache

pytestmark = pytest.mark.page  # it needs Chromium, as the tests of that lane do
SCRIPT = Path(latentcache.__file__).parents[1] / "scripts" / "bench_page.py"


def test_it_measures_what_it_says(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--repetitions", "1", "--json", "--folder", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=True)
    report = json.loads(done.stdout)
    assert list(tmp_path.iterdir()) == []
    assert report["num_samples"] == 500
    for page in ("overview", "gallery"):
        assert 10 < report["results"][f"{page}_first_kb"]["median"] < 200
        assert 0 < report["results"][f"{page}_first_s"]["median"] < 30
    sizes = [report["results"][f"{page}_first_kb"]["median"] for page in ("overview", "gallery")]
    assert sizes[0] < sizes[1] - 10, "pictures of 8 samples, and of 24: both were the form that asks for the token"
    assert report["results"]["search_s"]["median"] > 0
