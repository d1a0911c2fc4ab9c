"""Runs a soak program at a short size, as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def run_soak(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs `scripts/<name>.py` with these arguments; its result. A case that failed fails the test."""

    def run(name: str, *arguments: object) -> dict[str, Any]:
        command = [sys.executable, str(SCRIPTS / f"{name}.py"), "--json", "--folder", str(tmp_path)]
        done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=280)
        assert done.stdout, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        assert result["failures"] == 0 and done.returncode == 0, done.stderr
        assert all(goal["n"] > 0 for goal in result["goals"])
        return result

    return run
