"""Check and test the project: makes .venv if needed, then runs ruff and pytest. Extra arguments go to pytest."""

from __future__ import annotations

import subprocess
import sys

import bootstrap


def main() -> int:
    bootstrap.inside()
    for check in (["check"], ["format", "--check"]):
        code = subprocess.run([sys.executable, "-m", "ruff", *check, "."], cwd=bootstrap.ROOT, check=False).returncode
        if code:
            return code
    return subprocess.run([sys.executable, "-m", "pytest", *sys.argv[1:]], cwd=bootstrap.ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
