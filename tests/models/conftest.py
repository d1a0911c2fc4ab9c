"""A tiny SDXL in every form that a model can come in. Nothing here reaches the hub."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
from helpers.tiny_models import save_diffusers_folder
from single_file import save_checkpoint

from latentcache.models.tiny import tiny_parts

COMMIT = ("c0ffee" * 7)[:40]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def parts() -> dict:
    """The parts of `tiny`. Shared: tests do not change them."""
    return tiny_parts()


@pytest.fixture(scope="session")
def folder(parts: dict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts as a diffusers folder. Shared: tests do not change it."""
    return save_diffusers_folder(parts, tmp_path_factory.mktemp("models") / "tiny-sdxl")


@pytest.fixture(scope="session")
def checkpoint(parts: dict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts as one file in the original SDXL layout."""
    return save_checkpoint(parts, tmp_path_factory.mktemp("checkpoints") / "tiny.safetensors")


@pytest.fixture
def add_to_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a folder into an empty hub cache as the repository someone/`name`, at a commit that `ref` names."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

    def add(name: str, content: Path, commit: str = COMMIT, ref: str = "main") -> None:
        repository = cache / f"models--someone--{name}"
        shutil.copytree(content, repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(commit)

    return add
