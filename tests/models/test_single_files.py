"""Parts of a model in one file, as people have it: by diffusers' names, or as its authors named its weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from helpers.tiny_models import (
    flux2_vae,
    image_vae,
    randomised,
    save_diffusers_folder,
    tiny_denoiser,
    tiny_encoders,
    tiny_folder,
    tiny_model,
)
from model_identities import F32
from original_layouts import autoencoder_tensors, denoiser_tensors
from safetensors.torch import load_file, save_file
from single_file import with_prefix

from latentcache.config import ModelConfig
from latentcache.errors import ModelError
from latentcache.families import family_named
from latentcache.models.denoiser import ORIGINAL_PREFIX, load_denoiser, load_scheduler
from latentcache.models.family import family_of
from latentcache.models.model_loader import LoadedModels, ModelLoader
from latentcache.models.vae import vae_facts

FAMILIES_LANE = pytest.mark.families


# A denoiser: diffusers converts it, and all counts.


def check_same(found: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    state = found.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)


OTHERS = ("wan", "wan-i2v", "qwen-image", "krea2", "flux2", "flux2-dev", "anima", "qwen-image-21", "ernie-image")
MORE = [("sd15", ORIGINAL_PREFIX), ("anima", "net."), *((name, "") for name in OTHERS)]
FILES = [
    *(("z-image", prefix) for prefix in ("", ORIGINAL_PREFIX)),
    *(pytest.param(*each, marks=FAMILIES_LANE) for each in MORE),
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


@FAMILIES_LANE
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


# A VAE.


def real_vae(name: str) -> Any:
    """With the blocks of the published VAEs, which decide the names, and few channels."""
    class_name = family_named(name).parts["vae"].class_name.split(".")[1]
    if class_name == "AutoencoderKLFlux2":
        return flux2_vae(3)
    if class_name == "AutoencoderKL":
        return image_vae(16, use_quant_conv=False, use_post_quant_conv=False, scaling_factor=0.3611, shift_factor=0.1)
    sizes = {"base_dim": 4, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
    statistics = {"latents_mean": [0.5] * 16, "latents_std": [2.0] * 16}
    return randomised(getattr(diffusers, class_name)(**sizes, **statistics), 3)


def vae_loader_of(name: str, vae: Any, file: Path) -> ModelLoader:
    """The file as model.vae of a diffusers folder whose VAE has the same settings."""
    vae.save_config(file.parent / "model" / "vae")
    return ModelLoader(str(file.parent / "model"), vae=str(file), family=family_named(name))


OF_EACH_VAE = ("flux", "wan", "qwen-image", "flux2")
"""One family of each class of VAE whose files diffusers converts."""


def test_a_file_with_the_statistics_of_another_model_is_refused(tmp_path: Path) -> None:
    """FLUX.2's VAE as ComfyUI has it, for Ideogram 4, whose network is the same."""
    vae = tiny_encoders("ideogram4")["vae"]
    save_file(autoencoder_tensors("flux2", vae), file := tmp_path / "own.safetensors")
    loader = vae_loader_of("ideogram4", vae, file)
    assert loader.vae_facts() == vae_facts(vae, family_named("ideogram4"))
    other = flux2_vae(3)
    other.bn.running_mean.copy_(vae.bn.running_mean.view(4, 32).T.flatten())
    save_file(autoencoder_tensors("flux2", other), file := tmp_path / "flux2-vae.safetensors")
    with pytest.raises(ModelError, match=r"\(bn\) are FLUX\.2's, as flux2-vae\.safetensors has them"):
        vae_loader_of("ideogram4", vae, file).vae_facts()


@FAMILIES_LANE
@pytest.mark.parametrize(("name", "prefix"), [*((name, "") for name in OF_EACH_VAE), ("flux", "vae.")])
def test_a_file_in_the_layout_of_its_authors(name: str, prefix: str, tmp_path: Path) -> None:
    vae = real_vae(name).eval().requires_grad_(False)
    tensors = {prefix + key: value for key, value in autoencoder_tensors(name, vae).items()}
    save_file(tensors, file := tmp_path / "ae.safetensors")
    loader = vae_loader_of(name, vae, file)
    found, expected = loader.vae(F32).state_dict(), vae.state_dict()
    assert found.keys() == expected.keys() and len(tensors) == len(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert loader.vae_facts() == vae_facts(vae, family_named(name))
    assert loader.identity("vae", F32) == LoadedModels(family=family_named(name), vae=vae).identity("vae", F32)
    gone = next(key for key in tensors if "encoder.mid" in key)
    save_file({key: value for key, value in tensors.items() if key != gone}, file)
    with pytest.raises(ModelError, match=r"1 missing.*Name the vae folder of a diffusers model"):
        vae_loader_of(name, vae, file).vae(F32)


@FAMILIES_LANE
@pytest.mark.parametrize("name", [*OF_EACH_VAE, "qwen-image-21"])
def test_a_file_with_diffusers_names(name: str, tmp_path: Path) -> None:
    vae = tiny_encoders(name, 4)["vae"]
    save_file(
        {key: value.contiguous() for key, value in vae.state_dict().items()}, file := tmp_path / "vae.safetensors"
    )
    loader = vae_loader_of(name, vae, file)
    assert loader.identity("vae", F32) == LoadedModels(family=family_named(name), vae=vae).identity("vae", F32)
    half = loader.vae(torch.bfloat16)
    assert all(each.dtype is torch.bfloat16 for each in half.parameters()) and not half.training


@FAMILIES_LANE
def test_a_file_in_a_layout_that_diffusers_does_not_convert_is_refused(tmp_path: Path) -> None:
    """That of Wan 2.2's TI2V-5B: its blocks are nested once more than those of Wan 2.1."""
    tensors = autoencoder_tensors("wan", vae := real_vae("wan"))
    nested = {key.replace("samples.", "samples.0.", 1): value for key, value in tensors.items()}
    save_file(nested, file := tmp_path / "wan2.2_vae.safetensors")
    with pytest.raises(ModelError, match=r"AutoencoderKLWan.*in a layout that diffusers does not convert"):
        vae_loader_of("wan", vae, file).vae(F32)


# A whole model; and files that hold less.

WHOLE = {
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


@FAMILIES_LANE
@pytest.mark.parametrize("name", WHOLE)
def test_every_part_is_that_of_the_file(name: str, tmp_path: Path) -> None:
    parts = tiny_encoders(name, 3)
    tensors = {WHOLE[name]["vae"] + key: value for key, value in autoencoder_tensors(name, parts["vae"]).items()}
    for part, prefix in WHOLE[name].items():
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


def anima_files(folder: Path, prefix: str, of_encoder: str) -> dict[str, Any]:
    """As ComfyUI has them: the denoiser with its conditioner, and the VAE; Qwen3 next to its config. With the parts."""
    parts = tiny_model("anima", 3)
    shutil.copytree(tiny_folder("anima"), folder / "configs")
    for part in ("text_conditioner", "transformer", "vae"):
        (folder / "configs" / part / "diffusion_pytorch_model.safetensors").unlink()
    encoder = {of_encoder + name: value for name, value in parts["text_encoder"].state_dict().items()}
    saved(encoder, folder / "configs" / "text_encoder" / "model.safetensors")
    tensors = denoiser_tensors("anima", parts["transformer"], prefix)
    inside = {name: value for name, value in parts["text_conditioner"].state_dict().items()}
    tensors |= {f"{prefix}llm_adapter.{name}": value for name, value in inside.items()}
    saved({**tensors, f"{prefix}pos_embedder.seq": torch.arange(3.0)}, folder / "anima.safetensors")
    saved(parts["vae"].state_dict(), folder / "vae.safetensors")
    return parts


@FAMILIES_LANE
@pytest.mark.parametrize(("prefix", "of_encoder"), [("net.", "model."), ("", ""), (ORIGINAL_PREFIX, "")])
def test_a_denoiser_s_file_has_the_conditioner_of_its_texts_inside(
    prefix: str, of_encoder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts, family = anima_files(tmp_path, prefix, of_encoder), family_named("anima")
    file, config = tmp_path / "anima.safetensors", tmp_path / "configs"
    loader = ModelLoader(str(file), vae=str(tmp_path / "vae.safetensors"), config=str(config), family=family)
    expected = LoadedModels(family=family, **{name: parts[name] for name in family.parts})
    for part in family.parts:
        assert loader.identity(part, F32) == expected.identity(part, F32), part
    model = ModelConfig(path=str(file), config=str(config))
    assert family_of(model)[0] is family
    check_same(load_denoiser(dtype=F32, model=model), parts["transformer"].state_dict())
    assert load_scheduler(model=model).config.shift == 3.0
    assert "is not used" not in caplog.text
    load_denoiser(file, dtype=F32, model=ModelConfig(path=tiny_folder("anima")))
    assert "anima.safetensors: its text_conditioner is not used" in caplog.text
    with pytest.raises(ModelError, match=r"missing, e\.g\. .*as model\.vae"):
        ModelLoader(str(file), config=str(config), family=family).vae(F32)
    without = {name: each for name, each in load_file(file).items() if "llm_adapter.out_proj" not in name}
    saved(without, file)
    with pytest.raises(
        ModelError, match=r"2 missing, e\.g\. out_proj\.bias.*with its llm_adapter\.\* inside"
    ) as caught:
        ModelLoader(str(file), config=str(config), family=family).text_encoders(F32)
    assert caught.value.part == "text_conditioner"


@FAMILIES_LANE
@pytest.mark.parametrize("prefix", ["net.", ""])
def test_a_denoiser_s_file_runs_with_its_own_conditioner(
    prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else with that of the model: a finetune's differs."""
    parts, family = anima_files(tmp_path, prefix, ""), family_named("anima-states")
    file, model = tmp_path / "anima.safetensors", ModelConfig(path=tiny_folder("anima"), family="anima-states")
    own = randomised(parts["text_conditioner"], 9).state_dict()
    tensors = load_file(file)
    saved({**tensors, **{f"{prefix}llm_adapter.{name}": value for name, value in own.items()}}, file)
    found = load_denoiser(file, dtype=F32, model=model, family=family)
    check_same(found.text_conditioner, own)
    check_same(found, parts["transformer"].state_dict())
    assert "is not used" not in caplog.text and not found.text_conditioner.training
    saved({name: value for name, value in tensors.items() if "llm_adapter." not in name}, file)
    others = tiny_model("anima")["text_conditioner"].state_dict()
    check_same(load_denoiser(file, dtype=F32, model=model, family=family).text_conditioner, others)


@FAMILIES_LANE
@pytest.mark.parametrize("name", ["z-image", "wan", "qwen-image-21-edit", "ideogram4-projected"])
def test_a_file_with_the_denoiser_alone_is_no_model(name: str, tmp_path: Path) -> None:
    tensors: Any = denoiser_tensors("flux2" if name == "flux2-dev" else name, tiny_denoiser(name))
    loader = loader_of(name, saved(tensors, tmp_path / "model.safetensors"))
    with pytest.raises(ModelError, match=r"missing, e\.g\. .*as model\.vae|converts no files of"):
        loader.vae(F32)
    with pytest.raises(
        ModelError, match=r"that diffusers can read\. Name a diffusers folder.*\(--denoiser\)"
    ) as caught:
        loader.text_encoders(F32)
    assert caught.value.part == "text_encoder"
