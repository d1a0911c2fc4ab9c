"""Makes .venv and installs the project in it. Standard library only: this runs before anything is installed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Environment:
    """A virtual environment in the project's root: its folder, the file of its releases, and the extras in it."""

    name: str
    constraints: str
    extras: str = ""

    @property
    def path(self) -> Path:
        return ROOT / self.name

    @property
    def python(self) -> Path:
        return self.path / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def stamp(self) -> str:
        """What the environment is made from. It is rebuilt when this changes."""
        digest = hashlib.sha256(f"{sys.version_info[:2]} {ROOT}".encode())
        for name in ("pyproject.toml", self.constraints):
            digest.update((ROOT / name).read_bytes())
        return digest.hexdigest()


DEFAULT = Environment(".venv", "constraints.txt", "encode,test,docs,remote,ray,peers")


def install(made: Environment = DEFAULT) -> None:
    """Make the environment, unless it is there and up to date. Raises CalledProcessError if pip fails."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this script is what an older Python runs first
        sys.exit(f"latentcache needs Python 3.11 or newer, but this is {sys.version.split()[0]}")
    ours, stamp = made.path / "made-by-latentcache", made.path / "latentcache-installed"
    if stamp.exists() and stamp.read_text() == made.stamp():
        return
    if made.path.exists() and not ours.exists():
        sys.exit(
            f"{made.path} was not made by this script, and is left alone: move it away, or install with its own pip"
        )
    print(f"installing into {made.name} (a few minutes the first time) ...", file=sys.stderr, flush=True)
    venv.create(made.path, with_pip=True, clear=made.path.exists())
    ours.touch()
    pip = [str(made.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # pip's own output is kept off stdout, which belongs to the job (--json).
    project = f".[{made.extras}]" if made.extras else "."
    options = ["-c", made.constraints, "-e", project]
    subprocess.run([*pip, *options], cwd=ROOT, check=True, stdout=sys.stderr)
    stamp.write_text(made.stamp())


def inside() -> None:
    """Go on only inside the environment: outside, make it, run this script again in it, and exit with its code."""
    if Path(sys.prefix).resolve() == DEFAULT.path.resolve():
        return
    try:
        install()
    except subprocess.CalledProcessError as error:
        sys.exit(f"installing failed (pip exited with {error.returncode}); its messages are above")
    sys.exit(subprocess.run([str(DEFAULT.python), *sys.argv], check=False).returncode)
