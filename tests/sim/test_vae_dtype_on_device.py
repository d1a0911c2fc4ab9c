"""In which dtype a VAE computes on an accelerator: as its file says, not as diffusers fills in what the file lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from helpers.tiny_models import save_diffusers_folder, tiny_encoders

from latentcache import LatentCache
from latentcache.config import Config
from latentcache.families import family_named
from latentcache.models.model_loader import LoadedModels
from latentcache.precache.run import run_precache


def state_upcast(folder: Path, stated: bool | None) -> None:
    """Let a VAE's config state `force_upcast`, or not (None)."""
    file = folder / "config.json"
    settings: dict[str, Any] = json.loads(file.read_text())
    settings.pop("force_upcast", None)
    file.write_text(json.dumps(settings if stated is None else {**settings, "force_upcast": stated}))


CASES = [
    ("sd15", None, "float16", "has no force_upcast"),  # as Stable Diffusion 1.5 is published
    ("sd15", True, "float32", "has force_upcast"),
    ("sdxl", True, "float32", "has force_upcast"),  # as SDXL is published
    ("sdxl", False, "float16", "has no force_upcast"),
    ("sdxl", None, "float32", "does not say"),
]


@pytest.mark.parametrize("form", ["folder", "file", "loaded"])
@pytest.mark.parametrize(("family", "stated", "expected", "reason"), CASES)
def test_the_dtype_follows_the_file(
    make_config: Callable[..., Config],
    tmp_path: Path,
    device: torch.device,
    form: str,
    family: str,
    stated: bool | None,
    expected: str,
    reason: str,
) -> None:
    folder = save_diffusers_folder(tiny_encoders(family), tmp_path / "model", family)
    state_upcast(folder / "vae", stated)
    settings = {"encode.device": str(device), "encode.text_dtype": "float32", "model.family": family}
    models = None
    if form == "loaded":
        vae = AutoencoderKL.from_pretrained(folder / "vae").requires_grad_(False)
        models = LoadedModels(family=family_named(family), **{**tiny_encoders(family), "vae": vae})
    elif form == "file":
        settings["model.vae"] = str(folder / "vae" / "diffusion_pytorch_model.safetensors")
    config = make_config(**settings, **{"model.path": str(folder)})
    report = run_precache(config, models=models)
    assert report.num_refused == 0 and reason in report.placement["vae"]
    with LatentCache(config.cache.path) as cache:
        records = [cache.store.record(key) for key in cache.store.keys()]
    assert {each.provenance["computed_dtype"] for each in records if each.kind == "image"} == {expected}
