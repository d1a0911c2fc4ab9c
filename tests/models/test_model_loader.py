from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from helpers.encoding import encode_captions
from model_identities import F16, F32, PIXELS, identities
from safetensors.torch import load_file, save_file

from latentcache.errors import ModelError, TrainableEncoderError
from latentcache.families import DEFAULT, family_named
from latentcache.models.model_loader import LoadedModels, ModelLoader, ModelOrigin
from latentcache.models.tiny import tiny_parts
from latentcache.models.vae import encode_images


@pytest.fixture(params=["tiny", "folder", "checkpoint", "loaded"])
def models(request, parts, folder, checkpoint):
    """The same weights in each form that they can come in."""
    return {
        "tiny": lambda: ModelLoader("tiny"),
        "folder": lambda: ModelLoader(str(folder)),
        "checkpoint": lambda: ModelLoader(str(checkpoint), config=str(folder)),
        "loaded": lambda: LoadedModels(**parts),
    }[request.param]()


# One suite for all forms.


@pytest.mark.parametrize("dtype", [F32, F16])
def test_all_forms_have_the_same_identities(models, dtype):
    assert identities(models, dtype) == identities(ModelLoader("tiny"), dtype)


def test_all_forms_give_the_same_outputs(models, parts):
    assert torch.equal(encode_images(models.vae(F32), PIXELS), encode_images(parts["vae"], PIXELS))
    ours, expected = (encode_captions(m.text(F32), ["a cat", ""]) for m in (models, LoadedModels(**parts)))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_all_forms_give_frozen_cpu_modules_in_the_dtype(models):
    for dtype in (F16, F32):
        for module in (models.vae(dtype), *models.text_encoders(dtype).values()):
            assert not module.training
            assert {(p.device.type, p.dtype, p.requires_grad) for p in module.parameters()} == {("cpu", dtype, False)}
    assert models.identity("vae", F16) != models.identity("vae", F32)


# The memo.


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """What is loaded, as it happens."""
    counted: list[str] = []

    def counting(method):
        def count(self, *args):
            counted.append(args[0])
            return method(self, *args)

        return count

    for name in ("load",):
        monkeypatch.setattr(ModelOrigin, name, counting(getattr(ModelOrigin, name)))
    return counted


@pytest.mark.parametrize("form", ["folder", "checkpoint"])
def test_an_unchanged_model_is_not_loaded_again(form, folder, checkpoint, loads):
    path, config = (str(folder), None) if form == "folder" else (str(checkpoint), str(folder))
    memo: dict[str, str] = {}
    first = identities(ModelLoader(path, config=config, memo=memo))
    assert set(loads) - {"text_encoder_2"} == {"vae", "text_encoder", "tokenizer", "tokenizer_2"}
    loads.clear()
    again = ModelLoader(path, config=config, memo=json.loads(json.dumps(memo)))
    assert identities(again) == first
    assert again.vae_facts().scaling.scaling_factor == 0.13025
    assert loads == []


def test_a_touched_file_is_read_again_and_a_changed_one_is_another_part(folder, tmp_path, loads):
    shutil.copytree(folder, tmp_path / "model")
    memo: dict[str, str] = {}
    path = str(tmp_path / "model")
    before = identities(ModelLoader(path, memo=memo))
    weights = tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors"
    os.utime(weights, ns=(1, 1))
    loads.clear()
    assert identities(ModelLoader(path, memo=memo)) == before
    assert loads == ["vae"]
    tensors = load_file(weights)
    tensors["encoder.conv_in.bias"][0] += 1
    save_file(tensors, weights)
    after = identities(ModelLoader(path, memo=memo))
    assert [part for part in family_named(DEFAULT).parts if after[part] != before[part]] == ["vae"]


@pytest.fixture
def replaced(folder, tmp_path):
    """A model, and what replaces its VAE's weights and its tokenizer's end as a download does."""
    path = tmp_path / "model"
    shutil.copytree(folder, path)

    def replace() -> None:
        weights = path / "vae" / "diffusion_pytorch_model.safetensors"
        tensors = load_file(weights)
        tensors["encoder.conv_in.bias"] = tensors["encoder.conv_in.bias"] + 1
        save_file(tensors, path / "new")
        os.replace(path / "new", weights)
        settings = path / "tokenizer" / "tokenizer_config.json"
        text = json.loads(settings.read_text()) | {"model_max_length": 33}
        (path / "new").write_text(json.dumps(text))
        os.replace(path / "new", settings)

    return str(path), replace


@pytest.mark.parametrize("part", ["vae", "tokenizer"])
def test_a_file_that_is_replaced_is_neither_loaded_nor_remembered(part, replaced):
    """A loader is of the files that it met first: keys were made of these."""
    (path, replace), memo = replaced, {}
    models, idle = ModelLoader(path, memo=memo), ModelLoader(path, memo=memo)
    before = models.identity(part, F32)
    assert idle.identity(part, F32) == before, "from the memo: nothing is loaded"
    replace()
    load = {"vae": lambda models: models.vae(F32), "tokenizer": lambda models: models.tokenizers()}[part]
    load(models)  # it is in memory
    models.release()
    for each in (models, idle):
        for use in (load, lambda models: models.identity(part, F32)):
            with pytest.raises(ModelError, match="changed since they were first read"):
                use(each)
    after = ModelLoader(path, memo=memo).identity(part, F32)
    assert after == ModelLoader(path).identity(part, F32) != before


def test_a_file_that_is_replaced_while_it_is_loaded_is_refused(replaced, monkeypatch):
    path, replace = replaced
    genuine = ModelOrigin.load

    def load(self, part, dtype):
        found = genuine(self, part, dtype)
        replace()
        return found

    monkeypatch.setattr(ModelOrigin, "load", load)
    memo = {}
    with pytest.raises(ModelError, match="changed since they were first read"):
        ModelLoader(path, memo=memo).identity("vae", F32)
    assert memo == {}


def test_an_unreadable_memo_is_rewritten(folder):
    memo: dict[str, str] = {}
    first = ModelLoader(str(folder), memo=memo).identity("vae", F32)
    for damage in ("{", "[]", '{"weights": "x"}'):
        memo = dict.fromkeys(memo, damage)
        assert ModelLoader(str(folder), memo=memo).identity("vae", F32) == first
        assert damage not in memo.values()


# The caller's own modules.


def test_a_vae_in_a_folder_named_tiny_is_that_of_the_folder(parts, tmp_path, monkeypatch):
    """`tiny` is the name of a model, and a folder's path where the working directory has one of that name."""
    monkeypatch.chdir(tmp_path)
    parts["vae"].save_pretrained("tiny")
    state = load_file("tiny/diffusion_pytorch_model.safetensors")
    save_file({name: value + 1 for name, value in state.items()}, "tiny/diffusion_pytorch_model.safetensors")
    loader = ModelLoader("tiny", vae="tiny")
    found = loader.vae(F32).state_dict()
    assert all(torch.equal(found[name], value + 1) for name, value in state.items())
    assert loader.identity("vae", F32) != ModelLoader("tiny").identity("vae", F32)


@pytest.mark.parametrize("part", ["vae", "text_encoder", "text_encoder_2"])
def test_an_encoder_that_is_trained_is_refused(part):
    parts = tiny_parts()
    list(parts[part].parameters())[-1].requires_grad_(True)
    models = LoadedModels(**parts)
    for call in (lambda: models.identity(part, F32), lambda: (models.vae(F32), models.text(F32))):
        with pytest.raises(TrainableEncoderError, match="requires grad") as caught:
            call()
        assert caught.value.part == part


def test_the_callers_module_is_returned_as_it_is_or_copied_for_another_dtype(parts):
    models = LoadedModels(**parts)
    assert models.vae(F32) is parts["vae"]
    half = models.vae(F16)
    assert half is models.vae(F16)
    assert next(half.parameters()).dtype is F16
    assert next(parts["vae"].parameters()).dtype is F32


def test_offloaded_weights_are_refused():
    vae = tiny_parts()["vae"].to("meta")
    with pytest.raises(ModelError, match="meta device"):
        LoadedModels(vae=vae).identity("vae", F32)
