"""The benchmarks of planning, precaching and Ray run. What they measure is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.bench
SCRIPTS = Path(__file__).parents[2] / "scripts"


def measured(name: str, *options: object) -> dict[str, Any]:
    command = [sys.executable, SCRIPTS / name, "--tiny", "--json", "--repetitions", "1", *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True, timeout=280)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_planning(tmp_path: Path) -> None:
    found = measured("bench_plan.py", "--folder", tmp_path)["replan"]
    assert found.keys() == {"20", "40"}
    assert all(each.keys() == {"seconds", "peak_memory_mb", "us_per_sample"} for each in found.values())
    assert not list(tmp_path.iterdir())


def test_precaching() -> None:
    found = measured("bench_precache.py", "--full_size", "--device", "cpu")
    for figure in ("fraction_of_ceiling", "fraction_of_decode_ceiling", "captions_fraction_of_ceiling"):
        assert 0 < found[figure] < 2, figure
    assert found["encoder_bound"]["num_images"] == 3 and found["captions"]["num_captions"] == 6, "and the empty one"
    gains = found["settings_of_encoders"]
    assert {"plain, batch 1", "plain, batch 2", "channels_last, batch 2"} <= gains["images"].keys()
    assert {"sdpa, batch 1", "eager attention, batch 2"} <= gains["captions"].keys()


def test_ray() -> None:
    found = measured("bench_ray.py")
    assert 0 < found["times_of_one"]["median"] < 10 and found["num_encoders"] == 2
    assert found["num_started"] == 0, "with nothing to do no encoder is started"
