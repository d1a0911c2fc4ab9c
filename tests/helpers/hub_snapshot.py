"""A snapshot of a cache, as the Hugging Face hub's client keeps it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def snapshot_of(cache: Path, folder: Path) -> Path:
    """What `snapshot_download` makes of a cache that `hf upload` sent: links to files that are named by digests."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / ("0" * 40)
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(cache.rglob("*"))):
        name = path.relative_to(cache)
        if path.is_file() and (name.name == "CACHE.json" or name.parts[0] in ("packs", "manifests")):
            shutil.copy(path, blobs / str(number))
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / name).symlink_to(os.path.relpath(blobs / str(number), (snapshot / name).parent))
    for path in folder.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return snapshot
