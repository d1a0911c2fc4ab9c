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
NOT_ON_WINDOWS = "not (takes_the_place_of_a_damaged_file or pack_that_lies or full_disk or replaced_while_it_is_read)"
"""Tests that cannot pass on Windows. A mapped file cannot be replaced, so a damaged or refused pack stays until the
server restarts, and a manifest cannot be replaced while it is sent. The full disk is simulated by patching `os.write`,
which the Windows rules patch as well."""
ON_WINDOWS = (
    *("-p", "helpers.windows_rules", "-m", "not sim", "-k", NOT_ON_WINDOWS),
    *("tests/contract/test_stores.py", "tests/store/test_reopening.py", "tests/precache/test_run.py"),
    *("tests/loading/test_loader.py", "tests/checkpoints/test_checkpoint.py"),
    *("tests/transfers/test_transfers.py", "tests/service/test_routes.py"),
)
WITH_PINS = (
    *("-p", "helpers.missing_classes", "tests/integrations", "tests/models", "tests/families"),
    *("tests/precache/test_run.py", "tests/precache/test_staleness.py", "tests/loading/test_cache.py"),
)
ONE = ("-m", "pytest")
SHARED = (*ONE, "-n", NUM_WORKERS, "--dist", "worksteal")
LANES = {
    "default": SHARED,
    "sim": (*SHARED, "-m", "sim and not cuda", "tests/sim"),
    "extended": (*SHARED, "-m", "extended"),
    "programs": (*SHARED, "-m", "programs", "tests/test_programs.py"),
    "windows": (*SHARED, *ON_WINDOWS),
    "cuda": (*ONE, "-m", "sim and cuda", "tests/sim"),
    "floor": ("tests/golden/read_with_core.py",),
    "deepspeed": (*ONE, "-m", "deepspeed", "tests/zero3"),
    "onetrainer-pins": (*SHARED, *WITH_PINS),
}
"""What Python runs in each lane."""
OPT_IN = ("floor", "deepspeed", "onetrainer-pins")
IN_MEMORY = ("default", "sim", "extended", "windows", "onetrainer-pins")
ENVIRONMENTS = {
    "floor": bootstrap.Environment(".venv-floor", "constraints-floor.txt", interpreter="python3.10"),
    "onetrainer-pins": bootstrap.Environment(".venv-onetrainer-pins", "constraints-onetrainer.txt", "encode,test"),
}
"""The environments of lanes that do not use .venv."""
CHROMIUM = Path("/usr/bin/chromium")
CUDA_IS_HERE = "import sys, torch; sys.exit(not torch.cuda.is_available())"


def run(*command: str) -> int:
    """Run a command in the project's root. Returns its exit code."""
    return subprocess.run(command, cwd=bootstrap.ROOT, check=False).returncode


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


def run_lane(name: str, *for_pytest: str) -> bool:
    """Run the tests of a lane. Returns whether they passed; a lane without tests fails."""
    print(f"lane {name}", flush=True)
    start, program, made = time.monotonic(), LANES[name], ENVIRONMENTS.get(name)
    if name == "extended":
        install_chromium()
    is_ready = install_deepspeed() if name == "deepspeed" else made is None or installed(made)
    variables = {"PYTHONPATH": os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")])} if "-p" in program else {}
    with patch.dict(os.environ, variables), temporary_files_in_memory() if name in IN_MEMORY else nullcontext():
        python = sys.executable if made is None else str(made.python)
        passed = is_ready and run(python, *program, *(for_pytest if "pytest" in program else ())) == 0
    print(f"lane {name}: {'passed' if passed else 'FAILED'} in {time.monotonic() - start:.0f} s", flush=True)
    return passed


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
            if code := run(sys.executable, "-m", *check):
                return code
        if run(sys.executable, "-c", CUDA_IS_HERE) != 0:
            print("lane cuda: skipped, this machine has no CUDA device", flush=True)
            chosen.remove("cuda")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    passed = {name: run_lane(name, *(for_pytest if known.lane or name == "default" else ())) for name in chosen}
    failed = [name for name, ok in passed.items() if not ok]
    print(f"lanes: {', '.join(passed)}; {'failed: ' + ', '.join(failed) if failed else 'all passed'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
