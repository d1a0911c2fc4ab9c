"""Makes .venv and installs the project in it. Standard library only: this runs before anything is installed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = "latentcache-installed"
"""The file in an environment that says what it was made from."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment in the project's root: its folder, the file of its releases, and the extras in it.

    `data` is a package that is installed without its dependencies, for its files. `wider` is an environment in the same
    folder that has all of this one too. `interpreter` is the Python that it is
    made with, if not this one.
    """

    name: str
    constraints: str
    extras: str = ""
    data: str = ""
    wider: Environment | None = None
    interpreter: str = ""

    @property
    def path(self) -> Path:
        return ROOT / self.name

    @property
    def python(self) -> Path:
        return self.path / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def stamp(self) -> str:
        """What the environment is made from. It is rebuilt when this changes."""
        digest = hashlib.sha256(f"{sys.version_info[:2]} {self.interpreter} {ROOT} {self.extras} {self.data}".encode())
        for name in ("pyproject.toml", self.constraints):
            digest.update((ROOT / name).read_bytes())
        return digest.hexdigest()

    def stamped(self) -> str | None:
        """What the environment that is there was made from."""
        file = self.path / STAMP
        return file.read_text(encoding="utf-8") if file.exists() else None


DEFAULT = Environment(".venv", "constraints.txt", "encode,test,docs,remote,ray,peers")
QUICKSTART = Environment(".venv", "constraints.txt", "encode,lora", data="scikit-image", wider=DEFAULT)
"""What the quickstart needs. scripts/test.py adds the rest to it."""


def install(made: Environment = DEFAULT) -> None:
    """Make the environment, unless it is there and up to date. Raises CalledProcessError if pip fails."""
    if sys.version_info < (3, 11):
        needed = "the pinned releases need Python 3.11 or newer (latentcache itself runs on 3.10)"
        sys.exit(f"{needed}, but this is {sys.version.split()[0]}")
    ours = made.path / "made-by-latentcache"
    if made.stamped() in {each.stamp() for each in (made, made.wider) if each is not None}:
        return
    if made.path.exists() and not ours.exists():
        sys.exit(
            f"{made.path} was not made by this script, and is left alone: move it away, or install with its own pip"
        )
    cost = "the first time 5 to 10 minutes and 1.4 GB or more"
    print(f"installing into {made.name} ({cost}) ...", file=sys.stderr, flush=True)
    if not has_quickstart_only(made):
        make(made)
    ours.touch()
    pip_install(made, "-e", f".[{made.extras}]" if made.extras else ".")
    if made.data:  # last: after it pip would report what it lacks as an error
        pip_install(made, "--no-deps", made.data)
    (made.path / STAMP).write_text(made.stamp(), encoding="utf-8")


def make(made: Environment) -> None:
    """Make the environment with pip alone, in place of one that may be there."""
    subprocess.run([made.interpreter or sys.executable, "-m", "venv", "--clear", str(made.path)], check=True)


def has_quickstart_only(made: Environment) -> bool:
    """Whether the rest has to be added to what the quickstart installed."""
    return made == DEFAULT and made.stamped() == QUICKSTART.stamp()


def pip_install(made: Environment, *what: str) -> None:
    """Run pip. What it says goes to stderr, as stdout belongs to the job (--json)."""
    options = ("--progress-bar", "off", "--disable-pip-version-check", "-c", made.constraints)
    subprocess.run(
        [str(made.python), "-m", "pip", "install", *options, *what], cwd=ROOT, stdout=sys.stderr.fileno(), check=True
    )


def inside(made: Environment = DEFAULT) -> None:
    """Go on only inside the environment: outside, make it, run this script again in it, and exit with its code."""
    is_inside = Path(sys.prefix).resolve() == made.path.resolve()
    if is_inside and not has_quickstart_only(made):
        return
    try:
        install(made)
    except subprocess.CalledProcessError as error:
        sys.exit(f"installing failed (pip exited with {error.returncode}); its messages are above")
    if is_inside:
        return
    sys.exit(subprocess.run([str(made.python), *sys.argv], check=False).returncode)
