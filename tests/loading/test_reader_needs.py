"""Reading a cache needs none of the encoders' packages: a trainer may have other releases of them, or none."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run_without(modules: set[str], program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in which these modules cannot be imported."""
    code = "import runpy, sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(','))); del sys.argv[0]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    path = [str(ROOT), str(GOLDEN), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, "-c", code, ",".join(modules), str(program), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def modules_beyond_core() -> set[str]:
    """The modules of all installed packages that a plain `pip install latentcache` does not install."""
    wanted, names = [*PROJECT["dependencies"]], set[str]()
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        if name not in names and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            names.add(name)
            wanted += metadata.requires(name) or []
    homes = metadata.packages_distributions()
    return {module for module in homes if not names & {*map(canonicalize_name, homes[module])}} - {"latentcache"}


def test_batches_and_prompts_need_none_of_the_encoders_packages() -> None:
    done = run_without(modules_beyond_core(), GOLDEN / "read_with_core.py")
    assert done.returncode == 0 and "Run: pip install 'latentcache[encode]'" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("cyclopts", ["status", "cache"], "cli"),
        ("fastapi", ["serve", "cache"], "service"),
        ("urllib3", ["status", "http://127.0.0.1:9"], "remote"),
        ("obstore", ["status", "s3://bucket/cache"], "remote"),
    ],
)
def test_a_command_without_its_packages_says_what_to_install(
    tmp_path: Path, module: str, arguments: list[str], extra: str
) -> None:
    arguments = [str(tmp_path) if each == "cache" else each for each in arguments]
    done = run_without({module}, ROOT / "latentcache" / "__main__.py", *arguments)
    assert done.returncode == 2 and f"pip install 'latentcache[{extra}]'" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
