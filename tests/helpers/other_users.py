"""Folders of tests that another user may read: pytest makes its own for the user that runs it alone."""

from __future__ import annotations

import tempfile
from pathlib import Path


def open_to_others(path: Path, mode: int = 0o755) -> None:
    """Give this mode to the path and to all folders above it, up to the folder of temporary files."""
    top = Path(tempfile.gettempdir())
    for folder in (path, *path.parents):
        if top in folder.parents:
            folder.chmod(mode)
