"""A denoiser in a file of its authors' layout, as ComfyUI's users have it: diffusers converts it, and all counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from helpers.tiny_models import tiny_denoiser, tiny_folder
from original_layouts import denoiser_tensors
from safetensors.torch import save_file

from latentcache.config import ModelConfig
from latentcache.errors import ModelError
from latentcache.families import family_named
from latentcache.models.denoiser import ORIGINAL_PREFIX, load_denoiser

F32 = torch.float32


def check_same(found: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    state = found.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)


OTHERS = ("wan", "qwen-image", "krea2", "flux2", "flux2-dev")
PREFIXES = ("", ORIGINAL_PREFIX)
MORE = [("sd15", ORIGINAL_PREFIX), *((name, prefix) for name in OTHERS for prefix in PREFIXES)]
FILES = [
    *(("z-image", prefix) for prefix in PREFIXES),
    *(pytest.param(*each, marks=pytest.mark.families) for each in MORE),
]


@pytest.mark.parametrize(("name", "prefix"), FILES)
def test_every_tensor_of_the_file_is_used(name: str, prefix: str, tmp_path: Path) -> None:
    model = ModelConfig(path=tiny_folder(name), family=name)
    denoiser = tiny_denoiser(name, 4)
    tensors = denoiser_tensors("flux2" if name == "flux2-dev" else name, denoiser, prefix)
    save_file(tensors, file := tmp_path / "model.safetensors")
    check_same(load_denoiser(file, dtype=F32, model=model), denoiser.state_dict())
    save_file({**tensors, f"{prefix}extra.weight": torch.ones(3)}, file)
    with pytest.raises(ModelError, match=r"without a place, e\.g\. extra\.weight|of which diffusers places"):
        load_denoiser(file, dtype=F32, model=model)
    gone = next(each for each in tensors if "attn" in each or "attention" in each or "input_blocks.1" in each)
    save_file({each: value for each, value in tensors.items() if each != gone}, file)
    with pytest.raises(ModelError, match=r"missing|could not be loaded"):
        load_denoiser(file, dtype=F32, model=model)


@pytest.mark.families
@pytest.mark.parametrize("name", ["flux", "chroma"])
def test_files_whose_conversion_needs_the_published_width(name: str, tmp_path: Path) -> None:
    """diffusers' code for FLUX.1 and Chroma has 3072 in it: one block of each kind, in float8, with few numbers."""
    family = family_named(name)
    settings = {key: value for key, value in tiny_denoiser(name).config.items() if not key.startswith("_")}
    settings |= {"attention_head_dim": 128, "num_attention_heads": 24, "axes_dims_rope": (16, 56, 56)}
    model_class: Any = getattr(diffusers, family.denoiser_class.split(".")[1])
    with torch.device("meta"):
        denoiser = model_class(**settings)
    shapes = {key: value.shape for key, value in denoiser.state_dict().items()}
    # Both halves of each tensor have a byte of their own: an exchange of tensors or of halves shows.
    expected = {}
    for number, (key, shape) in enumerate(shapes.items()):
        halves = torch.full(shape, number, dtype=torch.uint8)
        halves[: shape[0] // 2] += 120 - len(shapes)
        expected[key] = halves.view(torch.float8_e4m3fn)
    denoiser.load_state_dict(expected, assign=True)
    denoiser.save_config(tmp_path / "model" / "transformer")
    save_file(denoiser_tensors(name, denoiser, ORIGINAL_PREFIX), file := tmp_path / "model.safetensors")
    model = ModelConfig(path=str(tmp_path / "model"), family=name)
    check_same(load_denoiser(file, dtype=torch.float8_e4m3fn, model=model), expected)


@pytest.mark.parametrize("scale", ["scaled_fp8", "blocks.0.attn.wq.scale_weight", "first.weight_scale"])
def test_weights_with_scales_of_their_own_are_refused(scale: str, tmp_path: Path) -> None:
    tensors = denoiser_tensors("krea2", tiny_denoiser("krea2"), ORIGINAL_PREFIX)
    save_file({**tensors, ORIGINAL_PREFIX + scale: torch.ones(1)}, file := tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"quantised, with scales of their own .*{scale}.*in bfloat16 or float16"):
        load_denoiser(file, dtype=F32, model=ModelConfig(path=tiny_folder("krea2"), family="krea2"))
