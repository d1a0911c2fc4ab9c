"""Damages packs of a cache, like a failing disk."""

from __future__ import annotations

import os
from pathlib import Path


def find_bytes(path: Path, needle: bytes) -> tuple[Path, int]:
    """Return the pack that contains these bytes, and their offset."""
    for pack in sorted(path.glob("packs/*/*.safetensors")):
        at = pack.read_bytes().find(needle)
        if at >= 0:
            return pack, at
    raise AssertionError("no pack holds these bytes")


def damage(path: Path, needle: bytes) -> None:
    """Flip one bit of these bytes in the pack that contains them."""
    pack, at = find_bytes(path, needle)
    os.chmod(pack, 0o600)
    with pack.open("r+b") as file:
        file.seek(at)
        file.write(bytes([needle[0] ^ 1]))
