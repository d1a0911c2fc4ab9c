"""Damage to the packs of a cache, as a failing disk does it."""

from __future__ import annotations

import os
from pathlib import Path


def damage(path: Path, needle: bytes) -> None:
    """Flip one bit of these bytes in whatever pack of the cache holds them."""
    for pack in path.glob("packs/*/*.safetensors"):
        data = bytearray(pack.read_bytes())
        at = data.find(needle)
        if at >= 0:
            data[at] ^= 1
            os.chmod(pack, 0o600)
            pack.write_bytes(data)
            return
    raise AssertionError("no pack holds these bytes")
