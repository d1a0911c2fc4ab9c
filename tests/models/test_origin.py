from __future__ import annotations

import os
import shutil
from importlib import metadata
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import save_diffusers_folder
from huggingface_hub.utils import filter_repo_objects
from model_identities import F32, PIXELS, identities
from safetensors.torch import load_file, save_file
from single_file import save_checkpoint, save_vae

from latentcache.config import ModelConfig
from latentcache.errors import ModelError
from latentcache.families.scaling import Scaling
from latentcache.models import files
from latentcache.models.denoiser import load_denoiser
from latentcache.models.model_loader import LoadedModels, ModelLoader
from latentcache.models.tiny import tiny_parts
from latentcache.models.vae import encode_images

# A separate VAE.


@pytest.fixture(scope="module")
def other_vae():
    return tiny_parts(seed=7)["vae"]


@pytest.mark.parametrize("form", ["whole folder", "flat folder", "file with config", "file alone", "file, checkpoint"])
def test_a_separate_vae(form, other_vae, folder, checkpoint, tmp_path):
    path, config = str(folder), None
    if form == "whole folder":
        vae = save_diffusers_folder(tiny_parts(seed=7), tmp_path / "other")
    elif form == "flat folder":
        other_vae.save_pretrained(vae := tmp_path / "flat")
    elif form == "file with config":
        other_vae.save_pretrained(tmp_path / "flat")
        vae = tmp_path / "flat" / "diffusion_pytorch_model.safetensors"
        path = "tiny"
    else:
        vae = save_vae(other_vae, tmp_path / "sdxl_vae.safetensors")
        if form == "file, checkpoint":
            path, config = str(checkpoint), str(folder)
    loader = ModelLoader(path, vae=str(vae), config=config)
    assert loader.identity("vae", F32) == LoadedModels(vae=other_vae).identity("vae", F32)
    assert torch.equal(encode_images(loader.vae(F32), PIXELS), encode_images(other_vae, PIXELS))
    assert loader.vae_facts().scaling == Scaling(0.13025)
    assert loader.identity("text_encoder", F32) == ModelLoader("tiny").identity("text_encoder", F32)


def test_another_class_of_vae_is_refused(other_vae, tmp_path):
    other_vae.save_pretrained(tmp_path / "taesd")
    config = tmp_path / "taesd" / "config.json"
    config.write_text(config.read_text().replace("AutoencoderKL", "AutoencoderTiny"))
    for call in (ModelLoader.vae_facts, lambda loader: loader.vae(F32)):
        with pytest.raises(ModelError, match="is a AutoencoderTiny, but sdxl has an AutoencoderKL"):
            call(ModelLoader("tiny", vae=str(tmp_path / "taesd")))


def test_a_vae_with_half_of_its_statistics_is_refused():
    vae = tiny_parts()["vae"]
    vae.register_to_config(latents_mean=[0.0] * 4)
    with pytest.raises(ModelError, match="latents_mean"):
        LoadedModels(vae=vae).vae_facts()


# Refusals.


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("part", ["vae", "unet"])
def test_pickled_weights_are_refused(part, folder, tmp_path):
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    (model / part / "diffusion_pytorch_model.safetensors").rename(model / part / "diffusion_pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no file named .*\.safetensors.*whole \.safetensors ones") as caught:
        ModelLoader(str(model)).vae(F32)
        load_denoiser(dtype=F32, model=ModelConfig(path=str(model)))
    assert caught.value.part == part


@pytest.mark.parametrize("name", ["model.ckpt", "model.bin", "model.pt"])
def test_a_pickled_checkpoint_is_refused(name, tmp_path):
    (file := tmp_path / name).write_bytes(b"")
    model = ModelConfig(path=str(file))
    for load in (lambda: ModelLoader(str(file)).vae(F32), lambda: load_denoiser(dtype=F32, model=model)):
        with pytest.raises(ModelError, match="is a pickle"):
            load()


@pytest.fixture
def hub(folder, add_to_hub) -> None:
    """A hub cache that holds the tiny model as someone/sdxl, and its VAE alone as someone/vae."""
    add_to_hub("sdxl", folder)
    add_to_hub("vae", folder / "vae")


def test_a_hub_id_in_the_cache_is_the_same_model_and_its_commit_is_its_origin(hub, folder, checkpoint):
    expected = identities(ModelLoader(str(folder)))
    loader = ModelLoader("someone/sdxl", vae="someone/vae")
    assert identities(loader) == expected
    assert loader.origin("vae") == "someone/vae@" + ("c0ffee" * 7)[:40]
    assert loader.origin("tokenizer") == "someone/sdxl@" + ("c0ffee" * 7)[:40]
    assert identities(ModelLoader("someone/sdxl", vae="someone/sdxl")) == expected
    assert identities(ModelLoader(str(checkpoint), config="someone/sdxl")) == expected


# Of the files of stabilityai/stable-diffusion-xl-base-1.0.
SDXL_FILES = [
    "model_index.json",
    "sd_xl_base_1.0.safetensors",
    "text_encoder/config.json",
    "text_encoder/model.fp16.safetensors",
    "text_encoder/model.safetensors",
    "text_encoder_2/config.json",
    "text_encoder_2/model.fp16.safetensors",
    "text_encoder_2/model.safetensors",
    "tokenizer/merges.txt",
    "tokenizer_2/vocab.json",
    "unet/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.fp16.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
    "vae_1_0/diffusion_pytorch_model.safetensors",
]


def test_a_model_that_cannot_be_had_says_how_to_get_it():
    step = r"Download it once while online \(hf download someone/none\), or name .* model\.path; `--model\.path tiny`"
    with pytest.raises(
        ModelError, match=rf"someone/none is not on this machine, and the hub cannot be reached\. {step}"
    ):
        ModelLoader("someone/none").origin("vae")


@pytest.mark.parametrize(("variant", "infix", "other"), [(None, "", ".fp16"), ("fp16", ".fp16", "")])
def test_only_the_needed_files_are_downloaded(variant, infix, other, folder, monkeypatch):
    call = {}
    monkeypatch.setattr(files, "snapshot_download", lambda name, **kw: call.update(kw, name=name) or str(folder))
    ModelLoader("stabilityai/sdxl", variant=variant).origin("vae")
    downloaded = set(
        filter_repo_objects(SDXL_FILES, allow_patterns=call["allow_patterns"], ignore_patterns=call["ignore_patterns"])
    )
    stems = {"vae": "diffusion_pytorch_model", "text_encoder": "model", "text_encoder_2": "model"}
    weights = {f"{part}/{stem}{infix}.safetensors" for part, stem in stems.items()}
    assert {name for name in downloaded if name.endswith(".safetensors")} == weights
    settings = {"model_index.json", "text_encoder/config.json", "tokenizer/merges.txt", "tokenizer_2/vocab.json"}
    assert settings <= downloaded
    assert not any(name.startswith(("unet", "vae_1_0", "sd_xl")) for name in downloaded)
    assert f"vae/diffusion_pytorch_model{other}.safetensors" not in downloaded


@pytest.mark.parametrize(
    ("missing", "part", "message"),
    [
        ("vae", "vae", "could not be loaded"),
        ("vae/diffusion_pytorch_model.safetensors", "vae", r"no file named diffusion_pytorch_model\.safetensors"),
        ("text_encoder_2", "text_encoder_2", "has no folder text_encoder_2"),
        ("tokenizer", "tokenizer", "has no folder tokenizer"),
    ],
)
def test_a_missing_part_is_named(missing, part, message, folder, tmp_path):
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    remove(model / missing)
    with pytest.raises(ModelError, match=message) as caught:
        identities(ModelLoader(str(model)))
    assert caught.value.part == part


@pytest.mark.parametrize(("part", "stem"), [("vae", "diffusion_pytorch_model"), ("text_encoder_2", "model")])
def test_missing_weights_are_refused_and_not_made_up(part, stem, folder, tmp_path):
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    file = model / part / f"{stem}.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "layer_norm1.weight" in name or "encoder.conv_in.bias" in name)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lacks 1 of the weights") as caught:
        ModelLoader(str(model)).identity(part, F32)
    assert name.removeprefix("text_model.") in str(caught.value)


@pytest.mark.parametrize("part", ["vae", "text_encoder", "text_encoder_2"])
def test_an_incomplete_checkpoint_is_refused(part, parts, folder, tmp_path):
    file = save_checkpoint(parts, tmp_path / "model.safetensors")
    tensors = load_file(file)
    marks = {"vae": "encoder.conv_in.bias", "text_encoder": "layers.0.layer_norm1.bias", "text_encoder_2": "ln_1.bias"}
    prefix = {
        "vae": "first_stage",
        "text_encoder": "conditioner.embedders.0",
        "text_encoder_2": "conditioner.embedders.1",
    }
    del tensors[next(n for n in tensors if n.startswith(prefix[part]) and n.endswith(marks[part]))]
    save_file(tensors, file)
    with pytest.raises(ModelError) as caught:
        ModelLoader(str(file), config=str(folder)).identity(part, F32)
    assert str(file) in str(caught.value)


def test_a_torn_file_is_refused(folder, tmp_path):
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    for part in ("vae/diffusion_pytorch_model", "text_encoder/model"):
        os.truncate(model / f"{part}.safetensors", 1000)
    loader = ModelLoader(str(model))
    with pytest.raises(ModelError, match=r"vae: .* could not be loaded"):
        loader.vae(F32)
    with pytest.raises(ModelError, match=r"text_encoder: .* could not be loaded"):
        loader.text(F32)


def test_in_the_environment_of_an_old_trainer_the_releases_are_named(folder, tmp_path, monkeypatch):
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    os.truncate(model / "vae/diffusion_pytorch_model.safetensors", 1000)
    asks = ["transformers>=999; extra == 'encode'", "diffusers>=0.1; extra == 'encode'", "ray>=999; extra == 'ray'"]
    monkeypatch.setattr(metadata, "requires", lambda name: asks)
    with pytest.raises(ModelError) as caught:
        ModelLoader(str(model)).vae(F32)
    had = f"This environment has transformers {metadata.version('transformers')} (needs >=999). Encode in another one"
    assert had in str(caught.value)


def test_a_checkpoint_whose_configs_are_not_sdxl_is_refused(checkpoint, folder, tmp_path):
    config = Path(shutil.copytree(folder, tmp_path / "config"))
    remove(config / "text_encoder_2")
    with pytest.raises(ModelError, match=r"has no folder text_encoder_2\. .*or set model\.family"):
        ModelLoader(str(checkpoint), config=str(config)).text(F32)
