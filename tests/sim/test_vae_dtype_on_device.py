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


@pytest.mark.parametrize(
    ("form", "family", "stated", "expected", "reason"),
    [
        ("folder", "sd15", None, "float16", "has no force_upcast"),  # as Stable Diffusion 1.5 is published
        ("loaded", "sd15", None, "float16", "has no force_upcast"),
        ("folder", "sdxl", True, "float32", "has force_upcast"),  # as SDXL is published
        ("file", "sdxl", False, "float16", "has no force_upcast"),
        ("loaded", "sdxl", None, "float32", "does not say"),
    ],
)
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
    file = folder / "vae" / "config.json"
    own = {name: value for name, value in json.loads(file.read_text()).items() if name != "force_upcast"}
    file.write_text(json.dumps(own if stated is None else {**own, "force_upcast": stated}))
    settings: dict[str, Any] = {"encode.device": str(device), "encode.text_dtype": "float32", "model.family": family}
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
