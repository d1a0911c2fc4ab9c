"""What the README shows works as it is shown."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from latentcache.cli.app import app
from latentcache.config import load_config
from latentcache.precache.run import run_precache

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.chdir(tmp_path)
    import quickstart

    (tmp_path / "configs").symlink_to(ROOT / "configs")
    config = load_config("configs/quickstart.yaml")
    quickstart.copy_photos(config.datasets[0].source.path)
    assert run_precache(config).num_samples >= 10
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 7
    names = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    sys.modules.pop("quickstart")


def test_a_trainer_of_ones_own_takes_ten_lines() -> None:
    block = re.search(r"These ten lines.*?```python\n(.*?)```", README, flags=re.DOTALL)
    assert block is not None
    lines = [line for line in block[1].splitlines() if line]
    assert len(lines) <= 10 and max(map(len, lines)) <= 120


def test_every_command_is_in_the_readme() -> None:
    commands = {name for name in app if not name.startswith("-")}
    table = README.partition("## The command line")[2].partition("## ")[0]
    assert commands == set(re.findall(r"^\| `([a-z]+)", table, flags=re.MULTILINE))
    assert len(commands) == 12


def test_the_two_commands_are_on_the_first_screen() -> None:
    first_screen = "\n".join(README.splitlines()[:24])
    assert "python3 scripts/quickstart.py" in first_screen and "python3 scripts/test.py" in first_screen
