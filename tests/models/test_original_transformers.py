"""A transformer in a file of the original layout, as ComfyUI's users have it: diffusers converts it, and all counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from latentcache.config import ModelConfig
from latentcache.errors import ModelError
from latentcache.models.denoiser import ORIGINAL_PREFIX, load_denoiser
from latentcache.models.tiny import tiny_denoiser

MODEL = ModelConfig(path="tiny", family="z-image")
NAMES = {
    "all_final_layer.2-1.": "final_layer.",
    "all_x_embedder.2-1.": "x_embedder.",
    ".attention.to_out.0.": ".attention.out.",
    ".attention.norm_k.": ".attention.k_norm.",
    ".attention.norm_q.": ".attention.q_norm.",
}


def original_tensors(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Z-Image's weights as its authors name them: one tensor for the queries, keys and values of a layer."""
    tensors = {}
    for name, value in state.items():
        if name.endswith((".to_k.weight", ".to_v.weight")):
            continue
        if name.endswith(".to_q.weight"):
            value = torch.cat([state[name.replace("to_q", part)] for part in ("to_q", "to_k", "to_v")])
            name = name.replace("to_q", "qkv")
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        tensors[prefix + name] = value.clone().contiguous()
    # diffusers has no such layer; real files hold it.
    return {**tensors, f"{prefix}norm_final.weight": torch.ones(32)}


@pytest.mark.parametrize("prefix", ["", ORIGINAL_PREFIX])
def test_every_tensor_of_the_file_is_used(prefix: str, tmp_path: Path) -> None:
    expected = tiny_denoiser(seed=4, family="z-image").state_dict()
    tensors = original_tensors(expected, prefix)
    save_file(tensors, file := tmp_path / "model.safetensors")
    found = load_denoiser(file, dtype=torch.float32, model=MODEL).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    save_file({**tensors, f"{prefix}layers.0.extra": torch.ones(3)}, file)
    with pytest.raises(ModelError, match=r"without a place, e\.g\. layers\.0\.extra"):
        load_denoiser(file, dtype=torch.float32, model=MODEL)
    gone = next(name for name in tensors if "qkv" in name)
    save_file({name: value for name, value in tensors.items() if name != gone}, file)
    with pytest.raises(ModelError, match="3 missing"):
        load_denoiser(file, dtype=torch.float32, model=MODEL)
