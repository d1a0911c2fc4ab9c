"""A VAE in one file, as people have it: by diffusers' names, or as its authors named its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from helpers.tiny_models import flux2_vae, image_vae, randomised, tiny_encoders
from model_identities import F32
from original_layouts import autoencoder_tensors
from safetensors.torch import save_file

from latentcache.errors import ModelError
from latentcache.families import FAMILIES, family_named
from latentcache.models.model_loader import LoadedModels, ModelLoader
from latentcache.models.vae import vae_facts

pytestmark = pytest.mark.families


def real_vae(name: str) -> Any:
    """With the blocks of the published VAEs, which decide the names, and few channels."""
    if name.startswith("flux2"):
        return flux2_vae(3)
    class_name = family_named(name).parts["vae"].class_name.split(".")[1]
    if class_name == "AutoencoderKL":
        return image_vae(16, use_quant_conv=False, use_post_quant_conv=False, scaling_factor=0.3611, shift_factor=0.1)
    sizes = {"base_dim": 4, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
    statistics = {"latents_mean": [0.5] * 16, "latents_std": [2.0] * 16}
    return randomised(getattr(diffusers, class_name)(**sizes, **statistics), 3)


def loader_of(name: str, vae: Any, file: Path) -> ModelLoader:
    """The file as model.vae of a diffusers folder whose VAE has the same settings."""
    vae.save_config(file.parent / "model" / "vae")
    return ModelLoader(str(file.parent / "model"), vae=str(file), family=family_named(name))


LAYOUTS = [(name, "") for name in ("flux", "wan", "qwen-image", "krea2", "flux2", "flux2-dev")]


@pytest.mark.parametrize(("name", "prefix"), [*LAYOUTS, ("flux", "vae.")])
def test_a_file_in_the_layout_of_its_authors(name: str, prefix: str, tmp_path: Path) -> None:
    vae = real_vae(name).eval().requires_grad_(False)
    tensors = {prefix + key: value for key, value in autoencoder_tensors(name, vae).items()}
    save_file(tensors, file := tmp_path / "ae.safetensors")
    loader = loader_of(name, vae, file)
    found, expected = loader.vae(F32).state_dict(), vae.state_dict()
    assert found.keys() == expected.keys() and len(tensors) == len(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert loader.vae_facts() == vae_facts(vae)
    assert loader.identity("vae", F32) == LoadedModels(family=family_named(name), vae=vae).identity("vae", F32)
    gone = next(key for key in tensors if "encoder.mid" in key)
    save_file({key: value for key, value in tensors.items() if key != gone}, file)
    with pytest.raises(ModelError, match=r"1 missing.*Name the vae folder of a diffusers model"):
        loader_of(name, vae, file).vae(F32)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_with_diffusers_names(name: str, tmp_path: Path) -> None:
    vae = tiny_encoders(name, 4)["vae"]
    save_file(
        {key: value.contiguous() for key, value in vae.state_dict().items()}, file := tmp_path / "vae.safetensors"
    )
    loader = loader_of(name, vae, file)
    assert loader.identity("vae", F32) == LoadedModels(family=family_named(name), vae=vae).identity("vae", F32)
    half = loader.vae(torch.bfloat16)
    assert all(each.dtype is torch.bfloat16 for each in half.parameters()) and not half.training


@pytest.mark.parametrize(
    ("name", "other"), [("flux", "wan"), ("wan", "flux"), ("flux2", "flux"), ("qwen-image", "flux")]
)
def test_a_file_of_another_vae_is_refused(name: str, other: str, tmp_path: Path) -> None:
    save_file(autoencoder_tensors(other, real_vae(other)), file := tmp_path / "ae.safetensors")
    with pytest.raises(ModelError) as caught:
        loader_of(name, real_vae(name), file).vae(F32)
    assert caught.value.part == "vae" and str(file) in str(caught.value)


def test_a_file_in_a_layout_that_diffusers_does_not_convert_is_refused(tmp_path: Path) -> None:
    """That of Wan 2.2's TI2V-5B: its blocks are nested once more than those of Wan 2.1."""
    tensors = autoencoder_tensors("wan", vae := real_vae("wan"))
    nested = {key.replace("samples.", "samples.0.", 1): value for key, value in tensors.items()}
    save_file(nested, file := tmp_path / "wan2.2_vae.safetensors")
    with pytest.raises(ModelError, match=r"AutoencoderKLWan.*in a layout that diffusers does not convert"):
        loader_of("wan", vae, file).vae(F32)
