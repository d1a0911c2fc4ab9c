"""Programs as processes: benchmarks and soak programs at a tiny size, the core's own environment, the wheel.

Of a benchmark or a soak program only failed cases count, not what it measures.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.programs

TESTS = Path(__file__).parent
SCRIPTS = TESTS.parent / "scripts"
COLD = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the page cache cannot be dropped here")
PRELOADED = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler named cc"
)

ON_SIMULATED_DEVICE = (
    "import runpy, sys; from simulated import install; install(); del sys.argv[0]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def benchmark(name: str, *parts: str, marks: Any = ()) -> Any:
    return pytest.param(name, parts, marks=marks, id=" ".join([name, *parts]))


def run(script: str, folder: Path, *arguments: str, on_simulated_device: bool = False) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), "--tiny", "--folder", str(folder), *arguments]
    paths = [str(SCRIPTS), str(TESTS / "sim"), os.environ.get("PYTHONPATH", "")]
    if on_simulated_device:
        command[1:1] = ["-c", ON_SIMULATED_DEVICE]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=variables)
    assert done.returncode == 0 and done.stdout, done.stderr
    assert not list(folder.iterdir()), "something is left"
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        benchmark("bench_read", "warm"),
        benchmark("bench_read", "cold", "wait", marks=COLD),
        benchmark("bench_write"),
        benchmark("bench_precache"),
        benchmark("bench_onetrainer"),
        benchmark("bench_scale"),
    ],
)
def test_a_benchmark_measures_what_it_says(script, parts, tmp_path):
    chosen = ("--part", *parts) if parts else ()
    result = run(script, tmp_path, "--json", "--repetitions", "1", *chosen)
    assert {"cpu", "memory_bytes", "filesystem", "device", "torch", "date"} <= result["environment"].keys()
    assert set(parts) <= result.keys() and "median" in json.dumps(result)


FIGURES = {
    "ceilings": {"host to device, pageable", "convolution, bfloat16, channels_last"},
    "vae": {"float32, channels_last, batch 2", "precache of photos of 12 megapixels over its ceiling"},
    "text": {"batch 4", "precache over the encoders alone"},
    "copies": {"batch of 16 over one copy", "clip over one copy"},
    "step": {"step with the loader over one batch", "waiting for the loader, p99"},
    "phases": {"lend the VAE, over the fastest copy", "park all and bring it back"},
    "decode": {"decode an image whole", "decode an image in tiles"},
    "checkpoint": {"load a LoRA and AdamW, over a pageable copy", "load the UNet, over a pageable copy"},
}


@pytest.mark.parametrize("parts", [("ceilings", "vae", "text", "copies"), ("step", "phases", "decode", "checkpoint")])
def test_each_part_of_the_program_for_a_card_runs_on_the_cpu(parts, tmp_path):
    result = run("bench_cuda", tmp_path, "--json", "--device", "cpu", "--repetitions", "1", "--part", *parts)
    for part in parts:
        assert FIGURES[part] <= result[part].keys()
        assert all(figure["value"] >= 0 for figure in result[part].values())


ANYWHERE = ("batches", "syncs", "memory", "leaving")
CHECKS = {"cpu": (*ANYWHERE, "flags", "numbers", "halving", "ddp", "validation"), "sim": ANYWHERE}


@pytest.mark.parametrize("device", CHECKS)
def test_the_checks_for_a_card_pass_on_other_devices(device, tmp_path):
    """The CPU skips `leaving`, which needs a second device. The simulated one runs what depends on the device."""
    arguments = ("--json", "--device", device, "--part", *CHECKS[device])
    found = run("bench_cuda", tmp_path, *arguments, on_simulated_device=device == "sim")
    skipped = [name for name in CHECKS[device] if found[name].startswith("skipped")]
    assert skipped == (["leaving"] if device == "cpu" else [])


@pytest.mark.parametrize(
    ("script", "part", "figures"),
    [
        pytest.param("soak_crash", "kill", {"killed": 25}, marks=PRELOADED),
        pytest.param("soak_crash", "power", {}, marks=PRELOADED),
        pytest.param("soak_crash", "faults", {"typed_errors": 13, "succeeded": 1}, marks=PRELOADED),
        ("soak_rot", "rot", {"refused": 40, "identical": 10, "fixed_as_advised": 1}),
        ("soak_load", "writers", {}),
        ("soak_load", "mixed", {"trainer num_runs": 2, "precache num_runs": 1}),
    ],
)
def test_no_case_of_a_soak_program_fails(script, part, figures, tmp_path):
    result = run(script, tmp_path, "--part", part)
    assert result["failures"] == 0 and result["n"] > 0
    for name, least in figures.items():
        assert sum(goal["figures"].get(name, 0) for goal in result["goals"]) >= least, f"too few cases with {name}"


@pytest.mark.timeout(1200)  # the first run installs torch
def test_the_core_alone_reads_the_golden_cache(monkeypatch):
    """Its packages are at their lowest supported releases, except torch."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bootstrap

    core = bootstrap.Environment(".venv-core", "constraints-core.txt")
    bootstrap.install(core)
    subprocess.run([str(core.python), str(TESTS / "golden/read_with_core.py")], check=True)


def test_the_wheel_and_the_source_distribution_build_and_run():
    subprocess.run([sys.executable, str(TESTS / "wheel/use_wheel.py")], check=True)
