from __future__ import annotations

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
            counted.append(args[0] if args else "tokenizers")
            return method(self, *args)

        return count

    for name in ("load", "load_tokenizers"):
        monkeypatch.setattr(ModelOrigin, name, counting(getattr(ModelOrigin, name)))
    return counted


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


# The caller's own modules.


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
