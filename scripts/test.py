"""Check and test the project: makes .venv if needed, runs ruff and mypy, then each lane of tests in its own process.

CONTRIBUTING.md describes the lanes. `--lane NAME` runs only that lane, without ruff and mypy; it may be repeated. Three
lanes run only when they are named: `floor`, whose torch downloads gigabytes of CUDA libraries; `deepspeed`, which
installs DeepSpeed into .venv and needs a C++ compiler; and `onetrainer-pins`, which has its own environment. Extra
arguments go to pytest, in the default lane or in the lanes that are named.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import bootstrap

NUM_WORKERS = str(min(4, os.cpu_count() or 1))
"""pytest processes of a lane. Each runs torch with one thread, because the models are tiny."""
MEMORY = Path("/dev/shm")
"""Linux's in-memory file system. The suite fsyncs thousands of small files; on a disk that takes half of its time."""
MEMORY_BYTES = 2 << 30
LANES = (
    *("default", "sim", "bench", "soak", "families", "service", "remote", "page", "core", "wheel", "windows", "cuda"),
    *("floor", "deepspeed", "onetrainer-pins"),
)
WINDOWS_TESTS = (
    *("tests/contract/test_stores.py", "tests/store/test_reopening.py", "tests/precache/test_run.py"),
    *("tests/loading/test_loader.py", "tests/checkpoints/test_checkpoint.py"),
    *("tests/transfers/test_transfers.py", "tests/service/test_routes.py"),
)
NOT_ON_WINDOWS = "not (takes_the_place_of_a_damaged_file or pack_that_lies or full_disk or replaced_while_it_is_read)"
"""Tests that cannot pass on Windows. A mapped file cannot be replaced, so a damaged or refused pack stays until the
server restarts, and a manifest cannot be replaced while it is sent. The full disk is simulated by patching `os.write`,
which the Windows rules patch as well."""
OPT_IN = ("floor", "deepspeed", "onetrainer-pins")
IN_MEMORY = ("default", "windows", "sim", "families", "service", "remote", "page", "onetrainer-pins")
PINS = bootstrap.Environment(".venv-onetrainer-pins", "constraints-onetrainer.txt", "encode,test")
CORE = bootstrap.Environment(".venv-core", "constraints-core.txt")
FLOOR = bootstrap.Environment(".venv-floor", "constraints-floor.txt", interpreter="python3.10")
PINS_TESTS = (
    *("tests/integrations", "tests/models", "tests/families"),
    *("tests/precache/test_run.py", "tests/precache/test_staleness.py", "tests/loading/test_cache.py"),
)
PROGRAMS = "tests/test_programs.py"
CHROMIUM = Path("/usr/bin/chromium")
CUDA_IS_HERE = "import sys, torch; sys.exit(not torch.cuda.is_available())"


def run(*command: str) -> int:
    """Run a command in the project's root. Returns its exit code."""
    return subprocess.run(command, cwd=bootstrap.ROOT, check=False).returncode


def lane(name: str, *arguments: str, python: str = sys.executable, program: Sequence[str] = ("-m", "pytest")) -> bool:
    """Run a lane's tests. Returns whether they passed; a lane without tests fails."""
    print(f"lane {name}", flush=True)
    start = time.monotonic()
    passed = run(python, *program, *arguments) == 0
    print(f"lane {name}: {'passed' if passed else 'FAILED'} in {time.monotonic() - start:.0f} s", flush=True)
    return passed


@contextmanager
def temporary_files_in_memory() -> Iterator[None]:
    """Put the tests' temporary files into memory inside the block, if there is room."""
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < MEMORY_BYTES:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="latentcache-tests-", dir=MEMORY) as folder:
        Path(folder).chmod(0o755)  # some tests read as another user
        with patch.dict(os.environ, TMPDIR=folder):
            yield


def install_deepspeed() -> bool:
    """Install DeepSpeed into .venv unless it is there. Returns whether it is there now."""
    if importlib.util.find_spec("deepspeed") is not None:
        return True
    print("installing DeepSpeed into .venv ...", file=sys.stderr, flush=True)
    options = ["--quiet", "--disable-pip-version-check", "-c", "constraints.txt"]
    return run(sys.executable, "-m", "pip", "install", *options, "-e", f".[{bootstrap.DEFAULT.extras},deepspeed]") == 0


def install_chromium() -> None:
    """Install Chromium if root may use apt-get here. Without Chromium the tests that need it fail and say so."""
    if CHROMIUM.exists() or shutil.which("apt-get") is None or os.geteuid() != 0:
        return
    print("installing Chromium ...", file=sys.stderr, flush=True)
    with patch.dict(os.environ, DEBIAN_FRONTEND="noninteractive"):
        run("apt-get", "-qq", "update")
        run("apt-get", "-qq", "install", "--yes", "--no-install-recommends", "chromium")


def installed(environment: bootstrap.Environment) -> bool:
    """Create or update an environment next to .venv. Returns whether that succeeded."""
    try:
        bootstrap.install(environment)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:  # pip failed, or the interpreter is missing
        print(f"{environment.name}: {error}", file=sys.stderr)
        return False
    return True


def lane_elsewhere(name: str, *arguments: str) -> bool:
    """Run a lane that has its own environment or another system's rules. Returns whether it passed."""
    if name in ("core", "floor"):  # without pytest
        made = CORE if name == "core" else FLOOR
        return installed(made) and lane(name, python=str(made.python), program=["tests/golden/read_with_core.py"])
    if name == "wheel":
        return lane(name, program=["tests/wheel/use_wheel.py"])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")])):
        if name == "windows":
            options = ("-p", "helpers.windows_rules", "-m", "not (bench or soak or remote)", "-k", NOT_ON_WINDOWS)
            return lane(name, *options, *arguments, *WINDOWS_TESTS)
        pinned = ("-p", "helpers.missing_classes", *arguments, *PINS_TESTS)
        return installed(PINS) and lane(name, *pinned, python=str(PINS.python))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lane", action="append", choices=LANES, metavar="NAME", help=f"run only this lane: {', '.join(LANES)}"
    )
    known, for_pytest = parser.parse_known_args(arguments)
    bootstrap.inside()

    chosen = known.lane or [name for name in LANES if name not in OPT_IN]
    if not known.lane:
        for check in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]):
            code = run(sys.executable, "-m", *check)
            if code:
                return code
        if run(sys.executable, "-c", CUDA_IS_HERE) != 0:
            print("lane cuda: skipped, this machine has no CUDA device", flush=True)
            chosen.remove("cuda")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    passed = {}
    for name in chosen:
        with temporary_files_in_memory() if name in IN_MEMORY else nullcontext():
            passed[name] = run_lane(name, for_pytest if known.lane or name == "default" else ())
    failed = [name for name, ok in passed.items() if not ok]
    print(f"lanes: {', '.join(passed)}; {'failed: ' + ', '.join(failed) if failed else 'all passed'}", flush=True)
    return 1 if failed else 0


def run_lane(name: str, for_pytest: Sequence[str]) -> bool:
    """Run the tests of a lane. Returns whether they passed."""
    shared = ("-n", NUM_WORKERS, "--dist", "worksteal")
    match name:
        case "default":
            return lane(name, *shared, *for_pytest)
        case "sim" | "families":
            where = "tests/sim" if name == "sim" else "tests"
            return lane(name, *shared, "-m", f"{name} and not cuda", where, *for_pytest)
        case "bench":
            return lane(name, *shared, "-m", "bench", PROGRAMS, *for_pytest)
        case "soak":
            return lane(name, "-n", "2", "--dist", "worksteal", "-m", "soak", PROGRAMS, *for_pytest)
        case "service":
            return lane(name, *shared, "-m", "service", "tests/service", "tests/remote", "tests/contract", *for_pytest)
        case "remote":
            return lane(name, *shared, "-m", "remote", "tests", *for_pytest)
        case "page":
            install_chromium()
            return lane(name, *shared, "-m", "page", "tests/service", PROGRAMS, *for_pytest)
        case "cuda":
            return lane(name, "-m", "sim and cuda", "tests/sim", *for_pytest)
        case "deepspeed":
            return install_deepspeed() and lane(name, "-m", "deepspeed", "tests/zero3", *for_pytest)
        case _:
            return lane_elsewhere(name, *shared, *for_pytest)


if __name__ == "__main__":
    sys.exit(main())
