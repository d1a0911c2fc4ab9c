"""Check and test the project: makes .venv if needed, runs ruff and mypy, then each lane of tests in its own process.

Lanes: `default`; `sim`, the tests that need a second device, on a simulated one; `bench`, the benchmarks at a tiny
size; `soak`, the soak programs at a short size; `cuda`, the tests of `sim` on a CUDA device where there is one; with
`--deepspeed` the opt-in lane `deepspeed`, which installs DeepSpeed into .venv and needs a C++ compiler. Extra arguments
go to pytest in the default lane.
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
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import bootstrap

NUM_WORKERS = str(min(4, os.cpu_count() or 1))
"""Processes that share the tests of a lane. The models are tiny: torch's threads would wait for each other."""
MEMORY = Path("/dev/shm")
"""Linux' file system in memory. The suite writes thousands of small files durably: a disk takes half of its time."""
MEMORY_BYTES = 2 << 30
CUDA_IS_HERE = "import sys, torch; sys.exit(not torch.cuda.is_available())"


def run(*command: str) -> int:
    """The exit code of a command that runs in the project's root."""
    return subprocess.run(command, cwd=bootstrap.ROOT, check=False).returncode


def lane(name: str, *arguments: str) -> bool:
    """Whether the lane's tests pass. A lane that finds no test fails too."""
    print(f"lane {name}", flush=True)
    start = time.monotonic()
    passed = run(sys.executable, "-m", "pytest", *arguments) == 0
    print(f"lane {name}: {'passed' if passed else 'FAILED'} in {time.monotonic() - start:.0f} s", flush=True)
    return passed


@contextmanager
def temporary_files_in_memory() -> Iterator[None]:
    """Temporary files of the tests that run now lie in memory, where it has room for them."""
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < MEMORY_BYTES:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="latentcache-tests-", dir=MEMORY) as folder:
        Path(folder).chmod(0o755)  # some tests read as another user
        with patch.dict(os.environ, TMPDIR=folder):
            yield


def install_deepspeed() -> bool:
    """Whether DeepSpeed is in .venv, after installing it if it was not."""
    if importlib.util.find_spec("deepspeed") is not None:
        return True
    print("installing DeepSpeed into .venv ...", file=sys.stderr, flush=True)
    options = ["--quiet", "--disable-pip-version-check", "-c", "constraints.txt"]
    return run(sys.executable, "-m", "pip", "install", *options, "-e", ".[test,docs,deepspeed]") == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", action="store_true", help="run the opt-in lane deepspeed too")
    known, for_pytest = parser.parse_known_args(arguments)
    bootstrap.inside()

    for check in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]):
        code = run(sys.executable, "-m", *check)
        if code:
            return code
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shared = ("-n", NUM_WORKERS, "--dist", "worksteal")
    passed = {}
    with temporary_files_in_memory():
        passed["default"] = lane("default", *shared, *for_pytest)
        passed["sim"] = lane("sim", *shared, "-m", "sim and not cuda", "tests/sim")
    passed |= {
        "bench": lane("bench", *shared, "-m", "bench", *map(str, bootstrap.ROOT.glob("tests/*/test_bench_*.py"))),
        "soak": lane("soak", "-n", "2", "--dist", "worksteal", "-m", "soak", "tests/soak"),
    }
    if run(sys.executable, "-c", CUDA_IS_HERE) == 0:
        passed["cuda"] = lane("cuda", "-m", "sim and cuda", "tests/sim")
    else:
        print("lane cuda: skipped, this machine has no CUDA device", flush=True)
    if known.deepspeed:
        passed["deepspeed"] = install_deepspeed() and lane("deepspeed", "-m", "deepspeed", "tests/zero3")
    failed = [name for name, ok in passed.items() if not ok]
    print(f"lanes: {', '.join(passed)}; {'failed: ' + ', '.join(failed) if failed else 'all passed'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
