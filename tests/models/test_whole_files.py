"""A whole model in one file, as its authors or ComfyUI's users have it; and files that hold less."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_models import save_diffusers_folder, tiny_denoiser, tiny_encoders
from model_identities import F32
from original_layouts import autoencoder_tensors, denoiser_tensors
from safetensors.torch import save_file
from single_file import with_prefix

from latentcache.config import ModelConfig
from latentcache.errors import ModelError
from latentcache.families import FAMILIES, family_named
from latentcache.models.denoiser import ORIGINAL_PREFIX, load_denoiser
from latentcache.models.model_loader import LoadedModels, ModelLoader

pytestmark = pytest.mark.families

PREFIXES = {
    "sd15": {"vae": "first_stage_model.", "text_encoder": "cond_stage_model.transformer."},
    "flux": {
        "vae": "vae.",
        "text_encoder": "text_encoders.clip_l.transformer.",
        "text_encoder_2": "text_encoders.t5xxl.transformer.",
    },
}


def saved(tensors: Mapping[str, torch.Tensor], file: Path) -> Path:
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, file)
    return file


def loader_of(name: str, file: Path) -> ModelLoader:
    """The file with the configs and tokenizers of another model of the family, which has weights too."""
    config = file.parent / "configs"
    if not config.exists():
        save_diffusers_folder(tiny_encoders(name), config, name)
    return ModelLoader(str(file), config=str(config), family=family_named(name))


@pytest.mark.parametrize("name", PREFIXES)
def test_every_part_is_that_of_the_file(name: str, tmp_path: Path) -> None:
    parts = tiny_encoders(name, 3)
    tensors = {PREFIXES[name]["vae"] + key: value for key, value in autoencoder_tensors(name, parts["vae"]).items()}
    for part, prefix in PREFIXES[name].items():
        if part != "vae":
            state = parts[part].state_dict()
            named = with_prefix if prefix.endswith(("clip_l.transformer.", "stage_model.transformer.")) else str
            tensors |= {prefix + named(key): value for key, value in state.items()}
    if name == "sd15":
        tensors |= denoiser_tensors(name, tiny_denoiser(name, 3), ORIGINAL_PREFIX)
    file = saved(tensors, tmp_path / "model.safetensors")
    loader, expected = loader_of(name, file), LoadedModels(family=family_named(name), **parts)
    for part in family_named(name).parts:
        assert loader.identity(part, F32) == expected.identity(part, F32), part
    if name == "sd15":
        model = ModelConfig(path=str(file), family=name, config=str(tmp_path / "configs"))
        found, wanted = load_denoiser(dtype=F32, model=model).state_dict(), tiny_denoiser(name, 3).state_dict()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"sdxl", "sd15", "flux", "chroma"}))
def test_a_file_with_the_denoiser_alone_is_no_model(name: str, tmp_path: Path) -> None:
    tensors: Any = denoiser_tensors("flux2" if name == "flux2-dev" else name, tiny_denoiser(name))
    loader = loader_of(name, saved(tensors, tmp_path / "model.safetensors"))
    with pytest.raises(ModelError, match=r"missing, e\.g\. .*as model\.vae"):
        loader.vae(F32)
    with pytest.raises(
        ModelError, match=r"that diffusers can read\. Name a diffusers folder.*\(--denoiser\)"
    ) as caught:
        loader.text_encoders(F32)
    assert caught.value.part == "text_encoder"
