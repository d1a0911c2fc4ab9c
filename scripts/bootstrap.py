"""Makes .venv and installs the project in it. Standard library only: this runs before anything is installed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
OURS = VENV / "made-by-latentcache"
STAMP = VENV / "latentcache-installed"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def current_stamp() -> str:
    """What the environment is made from. It is rebuilt when this changes."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {ROOT}".encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def install() -> None:
    """Make the environment, unless it is there and up to date."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this script is what an older Python runs first
        sys.exit(f"latentcache needs Python 3.11 or newer, but this is {sys.version.split()[0]}")
    if STAMP.exists() and STAMP.read_text() == current_stamp():
        return
    if VENV.exists() and not OURS.exists():
        sys.exit(f"{VENV} was not made by this script, and is left alone: move it away, or install with its own pip")
    print("installing into .venv (a few minutes the first time) ...", file=sys.stderr, flush=True)
    venv.create(VENV, with_pip=True, clear=VENV.exists())
    OURS.touch()
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # pip's own output is kept off stdout, which belongs to the job (--json).
    subprocess.run([*pip, "-c", "constraints.txt", "-e", ".[test,docs]"], cwd=ROOT, check=True, stdout=sys.stderr)
    STAMP.write_text(current_stamp())


def inside() -> None:
    """Go on only inside the environment: outside, make it, run this script again in it, and exit with its code."""
    if Path(sys.prefix).resolve() == VENV.resolve():
        return
    try:
        install()
    except subprocess.CalledProcessError as error:
        sys.exit(f"installing failed (pip exited with {error.returncode}); its messages are above")
    sys.exit(subprocess.run([str(PYTHON), *sys.argv], check=False).returncode)
