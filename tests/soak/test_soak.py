"""Every soak program at a short size: no case fails, and there were cases of each sort."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.soak
needs_preloading = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler named cc"
)

Run = Callable[..., dict[str, Any]]
SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def run_soak(tmp_path: Path) -> Run:
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


@needs_preloading
def test_kills(run_soak: Run) -> None:
    instants, labelled = run_soak("soak_kill", "--n", 6)["goals"]
    assert instants["n"] == 6 and instants["killed_writers"] > 2
    assert labelled["labels"] > 100 and labelled["killed"] > 10


@needs_preloading
def test_power_cuts(run_soak: Run) -> None:
    assert run_soak("soak_power", "--n", 4)["n"] == 4 * 7


@needs_preloading
def test_faults(run_soak: Run) -> None:
    faults = run_soak("soak_faults", "--n", 1, "--operations", "add", "read", "compact")["goals"][0]
    assert faults["typed_errors"] > faults["n"] / 2 and faults["succeeded"] > 0


def test_bit_rot(run_soak: Run) -> None:
    flips, bursts, lengths, exchanges, index = run_soak("soak_rot", "--n", 100)["goals"]
    assert flips["n"] == 100 and flips["refused"] > 30 and flips["identical"] > 10
    for goal in (bursts, lengths, exchanges):
        assert goal["refused"] > 0
    assert index["n"] == 3


@pytest.mark.parametrize("target", ["packs", "manifests"])
def test_what_is_changed_gives_only_our_own_errors(run_soak: Run, target: str) -> None:
    (goal,) = run_soak("soak_fuzz", "--n", 2000, "--only", target)["goals"]
    assert goal["num_refused"] > goal["num_read"] > 0, "cases must reach the parser, and most must fail there"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *[("soak_inputs", ("--only", part)) for part in ("bombs", "races", "names")],
        ("soak_leaks", ()),  # open, read and close
        ("soak_writers", ()),  # processes that add the same entries at once
    ],
)
def test_nothing_fails(run_soak: Run, name: str, arguments: tuple[str, ...]) -> None:
    run_soak(name, "--n", 60, *arguments)


def test_trainers_precache_and_upkeep_at_once(run_soak: Run) -> None:
    figures = run_soak("soak_mixed", "--n", 10)["goals"][0]
    assert figures["trainer 1"] and figures["trainer 2"] and figures["precache"]["num_runs"]


def test_clients_of_one_server_at_once(run_soak: Run) -> None:
    (goal,) = run_soak("soak_service", "--n", 2, "--seconds", 6)["goals"]
    assert goal["num_errors"] == goal["num_wrong"] == 0 and goal["num_changes"] > 0
