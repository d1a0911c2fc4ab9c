"""Tiny models as the folders that people have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latentcache.models.tiny import tiny_pipeline


def save_diffusers_folder(parts: Mapping[str, Any], path: Path, family: str = "sdxl") -> Path:
    """Write the parts as a diffusers folder, which `ModelLoader` and diffusers read."""
    tiny_pipeline(parts, family=family).save_pretrained(path, safe_serialization=True)
    return path
