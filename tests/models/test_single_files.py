"""Parts of a model in one file, as people have it: by diffusers' names, or as its authors named its weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tensor_bits import assert_same_state
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
from safetensors.torch import load_file
from single_file import F32, autoencoder_tensors, denoiser_tensors, save, with_prefix

from latentcache.config import ModelConfig
from latentcache.errors import ModelError
from latentcache.families import family_named
from latentcache.models.denoiser import ORIGINAL_PREFIX, load_denoiser, load_scheduler
from latentcache.models.files import family_of
from latentcache.models.model_loader import LoadedModels, ModelLoader
from latentcache.models.vae import vae_facts

EXTENDED = pytest.mark.extended

# A denoiser: diffusers converts it, and all counts.

FILES = [
    ("z-image", ""),
    ("z-image", ORIGINAL_PREFIX),
    pytest.param("sd15", ORIGINAL_PREFIX, marks=EXTENDED),
    pytest.param("wan", "", marks=EXTENDED),  # by diffusers' names; some of its modules stay in float32
]


@pytest.mark.parametrize(("name", "prefix"), FILES)
def test_every_tensor_of_the_file_is_used(name: str, prefix: str, tmp_path: Path) -> None:
    model = ModelConfig(path=tiny_folder(name), family=name)
    denoiser = tiny_denoiser(name, 4)
    tensors = denoiser_tensors(name, denoiser, prefix)
    save(tensors, file := tmp_path / "model.safetensors")
    assert_same_state(load_denoiser(file, dtype=F32, model=model), denoiser.state_dict())
    denoiser.save_pretrained(own := tmp_path / "own")
    low, expected = (load_denoiser(path, dtype=torch.float8_e4m3fn, model=model) for path in (file, own))
    assert_same_state(low, expected.state_dict())
    save({**tensors, f"{prefix}extra.weight": torch.ones(3)}, file)
    with pytest.raises(ModelError, match=r"unexpected, e\.g\. extra\.weight|of which diffusers converts"):
        load_denoiser(file, dtype=F32, model=model)
    gone = next(each for each in tensors if "attn" in each or "attention" in each or "input_blocks.1" in each)
    save({each: value for each, value in tensors.items() if each != gone}, file)
    with pytest.raises(ModelError, match=r"missing|could not be loaded"):
        load_denoiser(file, dtype=F32, model=model)


@pytest.mark.parametrize("scale", ["scaled_fp8", "blocks.0.attn.wq.scale_weight", "first.weight_scale"])
def test_weights_with_scales_of_their_own_are_refused(scale: str, tmp_path: Path) -> None:
    tensors = {ORIGINAL_PREFIX + name: torch.ones(1) for name in ("x_embedder.weight", scale)}
    model = ModelConfig(path=tiny_folder("z-image"), family="z-image")
    with pytest.raises(ModelError, match=rf"quantised with separate scales .*{scale}.*in bfloat16 or float16"):
        load_denoiser(save(tensors, tmp_path / "model.safetensors"), dtype=F32, model=model)


# A VAE.


def real_vae(name: str) -> Any:
    """With the blocks of the published VAEs, which decide the names, and few channels."""
    if name == "flux2":
        return flux2_vae(3)
    return image_vae(16, use_quant_conv=False, use_post_quant_conv=False, scaling_factor=0.3611, shift_factor=0.1)


def vae_loader_of(name: str, vae: Any, file: Path) -> ModelLoader:
    """The file as model.vae of a diffusers folder whose VAE has the same settings."""
    vae.save_config(file.parent / "model" / "vae")
    return ModelLoader(str(file.parent / "model"), vae=str(file), family=family_named(name))


def test_a_file_with_the_statistics_of_another_model_is_refused(tmp_path: Path) -> None:
    """FLUX.2's VAE as ComfyUI has it, for Ideogram 4, whose network is the same."""
    vae = tiny_encoders("ideogram4")["vae"]
    file = save(autoencoder_tensors("flux2", vae), tmp_path / "own.safetensors")
    loader = vae_loader_of("ideogram4", vae, file)
    assert loader.vae_facts() == vae_facts(vae, family_named("ideogram4"))
    other = flux2_vae(3)
    other.bn.running_mean.copy_(vae.bn.running_mean.view(4, 32).T.flatten())
    file = save(autoencoder_tensors("flux2", other), tmp_path / "flux2-vae.safetensors")
    with pytest.raises(ModelError, match=r"\(bn\) .*FLUX\.2, as in flux2-vae\.safetensors"):
        vae_loader_of("ideogram4", vae, file).vae_facts()


@EXTENDED
@pytest.mark.parametrize("name", ["flux", "flux2"])
def test_a_vae_by_diffusers_names_and_in_the_layout_of_its_authors(name: str, tmp_path: Path) -> None:
    vae, family = real_vae(name).eval().requires_grad_(False), family_named(name)
    expected, of_authors = vae.state_dict(), autoencoder_tensors(name, vae)
    assert len(of_authors) == len(expected)
    prefixed = {f"vae.{key}": value for key, value in of_authors.items()}
    for number, tensors in enumerate((expected, of_authors, *([prefixed] if name == "flux" else []))):
        loader = vae_loader_of(name, vae, save(tensors, tmp_path / f"{number}.safetensors"))
        assert_same_state(loader.vae(F32), expected)
        assert loader.vae_facts() == vae_facts(vae, family)
        assert loader.identity("vae", F32) == LoadedModels(family=family, vae=vae).identity("vae", F32)
    half = loader.vae(torch.bfloat16)
    assert all(each.dtype is torch.bfloat16 for each in half.parameters()) and not half.training
    gone = next(key for key in of_authors if "encoder.mid" in key)
    file = save({key: value for key, value in of_authors.items() if key != gone}, tmp_path / "less.safetensors")
    with pytest.raises(ModelError, match=r"1 missing.*Set model\.vae to the vae folder of a diffusers model"):
        vae_loader_of(name, vae, file).vae(F32)


# A whole model; and files that hold less.

WHOLE = {
    "sd15": {"vae": "first_stage_model.", "text_encoder": "cond_stage_model.transformer."},
    "flux": {
        "vae": "vae.",
        "text_encoder": "text_encoders.clip_l.transformer.",
        "text_encoder_2": "text_encoders.t5xxl.transformer.",
    },
}


def loader_of(name: str, file: Path) -> ModelLoader:
    """The file with the configs and tokenizers of another model of the family, which has weights too."""
    config = save_diffusers_folder(tiny_encoders(name), file.parent / "configs", name)
    return ModelLoader(str(file), config=str(config), family=family_named(name))


@EXTENDED
@pytest.mark.parametrize("name", WHOLE)
def test_every_part_is_that_of_the_file(name: str, tmp_path: Path) -> None:
    parts = tiny_encoders(name, 3)
    tensors = {WHOLE[name]["vae"] + key: value for key, value in autoencoder_tensors(name, parts["vae"]).items()}
    for part, prefix in WHOLE[name].items():
        if part != "vae":
            named = str if "t5xxl" in prefix else with_prefix
            tensors |= {prefix + named(key): value for key, value in parts[part].state_dict().items()}
    if name == "sd15":
        tensors |= denoiser_tensors(name, tiny_denoiser(name, 3), ORIGINAL_PREFIX)
    file = save(tensors, tmp_path / "model.safetensors")
    loader, expected = loader_of(name, file), LoadedModels(family=family_named(name), **parts)
    for part in family_named(name).parts:
        assert loader.identity(part, F32) == expected.identity(part, F32), part
    if name == "sd15":
        model = ModelConfig(path=str(file), family=name, config=str(tmp_path / "configs"))
        assert_same_state(load_denoiser(dtype=F32, model=model), tiny_denoiser(name, 3).state_dict())


def anima_files(folder: Path, prefix: str, of_encoder: str) -> dict[str, Any]:
    """As ComfyUI has them: the denoiser with its conditioner, and the VAE; Qwen3 next to its config. With the parts."""
    parts = tiny_model("anima", 3)
    shutil.copytree(tiny_folder("anima"), folder / "configs")
    for part in ("text_conditioner", "transformer", "vae"):
        (folder / "configs" / part / "diffusion_pytorch_model.safetensors").unlink()
    encoder = {of_encoder + name: value for name, value in parts["text_encoder"].state_dict().items()}
    save(encoder, folder / "configs" / "text_encoder" / "model.safetensors")
    tensors = denoiser_tensors("anima", parts["transformer"], prefix)
    inside = {f"{prefix}llm_adapter.{name}": value for name, value in parts["text_conditioner"].state_dict().items()}
    save({**tensors, **inside, f"{prefix}pos_embedder.seq": torch.arange(3.0)}, folder / "anima.safetensors")
    save(parts["vae"].state_dict(), folder / "vae.safetensors")
    return parts


@EXTENDED
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
    assert_same_state(load_denoiser(dtype=F32, model=model), parts["transformer"].state_dict())
    assert load_scheduler(model=model).config.shift == 3.0
    assert "is not used" not in caplog.text
    load_denoiser(file, dtype=F32, model=ModelConfig(path=tiny_folder("anima")))
    assert "anima.safetensors: its text_conditioner is not used" in caplog.text
    with pytest.raises(ModelError, match=r"missing, e\.g\. .*Set model\.vae"):
        ModelLoader(str(file), config=str(config), family=family).vae(F32)
    save({name: each for name, each in load_file(file).items() if "llm_adapter.out_proj" not in name}, file)
    with pytest.raises(ModelError, match=r"2 missing, e\.g\. out_proj\.bias.*that includes llm_adapter\.\*") as caught:
        ModelLoader(str(file), config=str(config), family=family).text_encoders(F32)
    assert caught.value.part == "text_conditioner"


@EXTENDED
def test_a_denoiser_s_file_runs_with_its_own_conditioner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Else with that of the model: a finetune's differs."""
    parts, family = anima_files(tmp_path, "net.", ""), family_named("anima-states")
    file, model = tmp_path / "anima.safetensors", ModelConfig(path=tiny_folder("anima"), family="anima-states")
    own, tensors = randomised(parts["text_conditioner"], 9).state_dict(), load_file(file)
    save({**tensors, **{f"net.llm_adapter.{name}": value for name, value in own.items()}}, file)
    found = load_denoiser(file, dtype=F32, model=model, family=family)
    assert_same_state(found.text_conditioner, own)
    assert_same_state(found, parts["transformer"].state_dict())
    assert "is not used" not in caplog.text and not found.text_conditioner.training
    save({name: value for name, value in tensors.items() if "llm_adapter." not in name}, file)
    others = tiny_model("anima")["text_conditioner"].state_dict()
    assert_same_state(load_denoiser(file, dtype=F32, model=model, family=family).text_conditioner, others)


@EXTENDED
@pytest.mark.parametrize(
    ("name", "of_vae"),
    [
        ("z-image", r"missing, e\.g\. .*Set model\.vae"),
        ("qwen-image-21-edit", "diffusers cannot convert a AutoencoderKLQwenImage21"),
    ],
)
def test_a_file_with_the_denoiser_alone_is_no_model(name: str, of_vae: str, tmp_path: Path) -> None:
    loader = loader_of(name, save(tiny_denoiser(name).state_dict(), tmp_path / "model.safetensors"))
    with pytest.raises(ModelError, match=of_vae):
        loader.vae(F32)
    met = r"that diffusers can read\. Set model\.path to a diffusers folder.*\(--denoiser\)"
    with pytest.raises(ModelError, match=met) as caught:
        loader.text_encoders(F32)
    assert caught.value.part == "text_encoder"
