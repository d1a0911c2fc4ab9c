"""Configs of a folder of photos with the tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latentcache.config import Config
from latentcache.config_file import parse_config


def tiny_config(folder: Path, **changes: Any) -> Config:
    """`folder/photos` as the dataset `photos`, cached in `folder/cache`.

    Changes go by dotted name: tiny_config(folder, **{"encode.clip_skip": 1}).
    """
    settings: dict[str, Any] = {
        "cache": {"path": folder / "cache"},
        "datasets": [
            {
                "name": "photos",
                "source": {"kind": "folder", "path": folder / "photos"},
                "buckets": {"area": 96 * 96, "step": 32},
                "images": {"min_side": 8},
            }
        ],
        "model": {"path": "tiny"},
        "encode": {"device": "cpu", "num_workers": 2},
        "validation": {"prompts": ["a validation prompt"], "negative_prompt": "ugly"},
    }
    for dotted, value in changes.items():
        *sections, name = dotted.split(".")
        target: Any = settings
        for section in sections:
            target = target[int(section)] if section.isdigit() else target.setdefault(section, {})
        target[name] = value
    return parse_config(settings)


def config_of_dataset(folder: Path, settings: dict[str, Any] | None = None, **dataset: Any) -> Config:
    """Like `tiny_config`, with settings of the dataset as keywords and others by dotted name."""
    return tiny_config(folder, **{f"datasets.0.{name}": value for name, value in dataset.items()}, **settings or {})
