"""Create .venv and install the project in it. Uses the standard library only, as nothing is installed yet."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = "latentcache-installed"
"""File in an environment that records what it was made from."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment in the project's root: its folder, its constraints file and the extras to install.

    `data` is a package that is installed without its dependencies, only for its files. `interpreter` is the Python to
    create it with, if not the running one.
    """

    name: str
    constraints: str
    extras: str = ""
    data: str = ""
    interpreter: str = ""

    @property
    def path(self) -> Path:
        return ROOT / self.name

    @property
    def python(self) -> Path:
        return self.path / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def stamp(self) -> str:
        """Digest of everything the environment is made from. A change rebuilds it."""
        digest = hashlib.sha256(f"{sys.version_info[:2]} {self.interpreter} {ROOT} {self.extras} {self.data}".encode())
        for name in ("pyproject.toml", self.constraints):
            digest.update((ROOT / name).read_bytes())
        return digest.hexdigest()

    def stamped(self) -> str | None:
        """The stamp of the existing environment, or None."""
        file = self.path / STAMP
        return file.read_text(encoding="utf-8") if file.exists() else None


DEFAULT = Environment(".venv", "constraints.txt", "encode,test,docs,remote,ray,peers")
QUICKSTART = Environment(".venv", "constraints.txt", "encode,lora", data="scikit-image")
"""The quickstart's packages, in the same folder. scripts/test.py adds the rest of DEFAULT."""


def install(made: Environment = DEFAULT) -> None:
    """Create the environment unless it is up to date. Raises CalledProcessError if pip fails."""
    if sys.version_info < (3, 11):
        needed = "the pinned releases need Python 3.11 or newer (latentcache itself runs on 3.10)"
        sys.exit(f"{needed}, but this is {sys.version.split()[0]}")
    ours = made.path / "made-by-latentcache"
    if made.stamped() in (made.stamp(), DEFAULT.stamp()):
        return
    if made.path.exists() and not ours.exists():
        sys.exit(f"{made.path} was not created by this script: move it away, or install the project with its own pip")
    cost = "5 to 10 minutes and at least 1.4 GB the first time"
    print(f"installing into {made.name} ({cost}) ...", file=sys.stderr, flush=True)
    if made.stamped() != QUICKSTART.stamp():
        subprocess.run([made.interpreter or sys.executable, "-m", "venv", "--clear", str(made.path)], check=True)
    ours.touch()
    pip_install(made, "-e", f".[{made.extras}]" if made.extras else ".")
    if made.data:  # last, because later pip runs would report its missing dependencies as errors
        pip_install(made, "--no-deps", made.data)
    (made.path / STAMP).write_text(made.stamp(), encoding="utf-8")


def pip_install(made: Environment, *what: str) -> None:
    """Run pip. Its output goes to stderr, because stdout belongs to the caller (--json)."""
    options = ("--progress-bar", "off", "--disable-pip-version-check", "-c", made.constraints)
    subprocess.run(
        [str(made.python), "-m", "pip", "install", *options, *what], cwd=ROOT, stdout=sys.stderr.fileno(), check=True
    )


def inside(made: Environment = DEFAULT) -> None:
    """Return if we run inside the environment; else create it, run this script again in it and exit with its code."""
    is_inside = Path(sys.prefix).resolve() == made.path.resolve()
    if is_inside and made.stamped() != QUICKSTART.stamp():
        return
    try:
        install(made)
    except subprocess.CalledProcessError as error:
        sys.exit(f"installation failed: pip exited with {error.returncode}, see its messages above")
    if is_inside:
        return
    sys.exit(subprocess.run([str(made.python), *sys.argv], check=False).returncode)
