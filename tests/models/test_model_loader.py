"""A model's parts in every form that they can come in: what they are, when they are loaded, what is refused."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from diffusers.utils import logging as diffusers_logging
from helpers.tiny_models import encode_captions, save_diffusers_folder, tiny_denoiser, tiny_folder
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from single_file import F16, F32, PIXELS, identities, save_checkpoint, save_vae

from latentcache import LatentCache
from latentcache.config import Config, ModelConfig
from latentcache.errors import ModelError
from latentcache.families.scaling import Scaling
from latentcache.models import files
from latentcache.models.denoiser import load_denoiser, load_scheduler
from latentcache.models.model_loader import LoadedModels, ModelLoader, ModelOrigin
from latentcache.models.part_identity import weights_digest
from latentcache.models.tiny import tiny_parts, tiny_photos_pipeline
from latentcache.models.vae import encode_images
from latentcache.precache.run import run_precache

VAE_WEIGHTS = "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    """The model's folder, for a test to change."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


@pytest.mark.parametrize("form", ["tiny", "folder", "checkpoint", "loaded"])
def test_all_forms_are_the_same_model(form, parts, folder, checkpoint):
    models = {
        "tiny": lambda: ModelLoader("tiny"),
        "folder": lambda: ModelLoader(str(folder)),
        "checkpoint": lambda: ModelLoader(str(checkpoint), config=str(folder)),
        "loaded": lambda: LoadedModels(**parts),
    }[form]()
    for dtype in (F16, F32):
        assert identities(models, dtype) == identities(ModelLoader("tiny"), dtype)
        for module in (models.vae(dtype), *models.text_encoders(dtype).values()):
            assert not module.training
            assert {(p.device.type, p.dtype, p.requires_grad) for p in module.parameters()} == {("cpu", dtype, False)}
    assert models.identity("vae", F16) != models.identity("vae", F32)
    assert torch.equal(encode_images(models.vae(F32), PIXELS), encode_images(parts["vae"], PIXELS))
    ours, expected = (encode_captions(m.text(F32), ["a cat", ""]) for m in (models, LoadedModels(**parts)))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_a_hub_id_in_the_cache_is_the_same_model_and_its_commit_is_its_origin(folder, checkpoint, add_to_hub):
    add_to_hub("sdxl", folder)
    add_to_hub("vae", folder / "vae")
    expected = identities(ModelLoader(str(folder)))
    loader = ModelLoader("someone/sdxl", vae="someone/vae")
    assert identities(loader) == expected
    assert loader.origin("vae") == "someone/vae@" + ("c0ffee" * 7)[:40]
    assert loader.origin("tokenizer") == "someone/sdxl@" + ("c0ffee" * 7)[:40]
    assert identities(ModelLoader("someone/sdxl", vae="someone/sdxl")) == expected
    assert identities(ModelLoader(str(checkpoint), config="someone/sdxl")) == expected


# A separate VAE.


@pytest.mark.parametrize("form", ["whole folder", "tiny", "file with config", "file alone", "file, checkpoint"])
def test_a_separate_vae(form, folder, checkpoint, tmp_path, monkeypatch):
    other, (path, config) = tiny_parts(seed=7)["vae"], ("tiny", None)
    monkeypatch.chdir(tmp_path)
    if form == "whole folder":
        vae = save_diffusers_folder(tiny_parts(seed=7), tmp_path / "other")
    elif form in ("tiny", "file with config"):
        # `tiny` is the name of a model, and a folder's path where the working directory has one of that name.
        other.save_pretrained(vae := Path("tiny"))
        vae = vae / "diffusion_pytorch_model.safetensors" if form == "file with config" else vae
    else:
        vae = save_vae(other, tmp_path / "sdxl_vae.safetensors")
        path, config = (str(checkpoint), str(folder)) if form == "file, checkpoint" else (str(folder), None)
    loader = ModelLoader(path, vae=str(vae), config=config)
    assert loader.identity("vae", F32) == LoadedModels(vae=other).identity("vae", F32)
    assert torch.equal(encode_images(loader.vae(F32), PIXELS), encode_images(other, PIXELS))
    assert loader.vae_facts().scaling == Scaling(0.13025)
    assert loader.identity("text_encoder", F32) == ModelLoader("tiny").identity("text_encoder", F32)


def test_another_kind_of_vae_is_refused(tmp_path):
    vae = tiny_parts()["vae"]
    vae.save_pretrained(tmp_path / "taesd")
    config = tmp_path / "taesd" / "config.json"
    config.write_text(config.read_text().replace("AutoencoderKL", "AutoencoderTiny"))
    for call in (ModelLoader.vae_facts, lambda loader: loader.vae(F32)):
        with pytest.raises(ModelError, match="is a AutoencoderTiny, but sdxl has an AutoencoderKL"):
            call(ModelLoader("tiny", vae=str(tmp_path / "taesd")))
    vae.register_to_config(latents_mean=[0.0] * 4)
    with pytest.raises(ModelError, match="latents_mean"):
        LoadedModels(vae=vae).vae_facts()


# The memo, and files that change.


def add_one(weights: Path) -> None:
    """Change weights of a VAE, as a download does: the file has the same size."""
    tensors = load_file(weights)
    tensors["encoder.conv_in.bias"] = tensors["encoder.conv_in.bias"] + 1
    save_file(tensors, weights.with_name("new"), metadata={"format": "pt"})
    os.replace(weights.with_name("new"), weights)


@pytest.mark.parametrize("form", ["folder", "checkpoint"])
def test_an_unchanged_model_is_not_loaded_again(form, folder, checkpoint, monkeypatch):
    loads, load = [], ModelOrigin.load
    monkeypatch.setattr(ModelOrigin, "load", lambda self, part, dtype: loads.append(part) or load(self, part, dtype))
    path, config = (str(folder), None) if form == "folder" else (str(checkpoint), str(folder))
    memo: dict[str, str] = {}
    first = identities(ModelLoader(path, config=config, memo=memo))
    assert set(loads) - {"text_encoder_2"} == {"vae", "text_encoder", "tokenizer", "tokenizer_2"}
    loads.clear()
    again = ModelLoader(path, config=config, memo=json.loads(json.dumps(memo)))
    assert identities(again) == first
    assert again.vae_facts().scaling.scaling_factor == 0.13025
    assert loads == []
    for damage in ("{", "[]", '{"weights": "x"}'):  # a memo that cannot be read is written again
        memo = dict.fromkeys(memo, damage)
        assert identities(ModelLoader(path, config=config, memo=memo)) == first
        assert damage not in memo.values()


@pytest.mark.parametrize("part", ["vae", "tokenizer"])
def test_a_file_that_is_replaced_is_neither_loaded_nor_remembered(part, copied):
    """A loader is of the files that it met first: keys were made of these."""
    memo: dict[str, str] = {}
    models, idle = (ModelLoader(str(copied), memo=memo) for _ in range(2))
    before = models.identity(part, F32)
    assert idle.identity(part, F32) == before, "from the memo: nothing is loaded"
    add_one(copied / VAE_WEIGHTS)
    settings = copied / "tokenizer" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": 33}))
    load = {"vae": lambda models: models.vae(F32), "tokenizer": lambda models: models.tokenizers()}[part]
    load(models)  # it is in memory
    models.release()
    for each in (models, idle):
        for use in (load, lambda models: models.identity(part, F32)):
            with pytest.raises(ModelError, match="changed since they were first read"):
                use(each)
    after = ModelLoader(str(copied), memo=memo).identity(part, F32)
    assert after == ModelLoader(str(copied)).identity(part, F32) != before


def test_a_file_that_is_replaced_while_it_is_loaded_is_refused(copied, monkeypatch):
    genuine, memo = ModelOrigin.load, {}

    def load(self, part, dtype):
        found = genuine(self, part, dtype)
        add_one(copied / VAE_WEIGHTS)
        return found

    monkeypatch.setattr(ModelOrigin, "load", load)
    with pytest.raises(ModelError, match="changed since they were first read"):
        ModelLoader(str(copied), memo=memo).identity("vae", F32)
    assert memo == {}


# The caller's own modules.


def test_the_callers_module_is_returned_as_it_is_or_copied_for_another_dtype(parts):
    models = LoadedModels(**parts)
    assert models.vae(F32) is parts["vae"]
    half = models.vae(F16)
    assert half is models.vae(F16)
    assert next(half.parameters()).dtype is F16
    assert next(parts["vae"].parameters()).dtype is F32
    with pytest.raises(ModelError, match="meta device"):  # as an offloaded one
        LoadedModels(vae=tiny_parts()["vae"].to("meta")).identity("vae", F32)


# Refusals.


@pytest.mark.parametrize("part", ["vae", "unet"])
def test_pickles_are_refused(part, copied, tmp_path):
    def load(path):
        return ModelLoader(path).vae(F32) if part == "vae" else load_denoiser(dtype=F32, model=ModelConfig(path=path))

    weights = copied / part / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(ModelError, match=r"no file named .*\.safetensors.*complete \.safetensors files"):
        load(str(copied))
    for suffix in ("ckpt", "bin", "pt"):
        (file := tmp_path / f"model.{suffix}").write_bytes(b"")
        with pytest.raises(ModelError, match="is a pickle"):
            load(str(file))


# Of the files of stabilityai/stable-diffusion-xl-base-1.0.
SETTINGS = {"model_index.json", "text_encoder/config.json", "tokenizer/merges.txt", "tokenizer_2/vocab.json"}
STEMS = {"vae": "diffusion_pytorch_model", "text_encoder": "model", "text_encoder_2": "model"}
OTHERS = {"sd_xl_base_1.0.safetensors", "unet/diffusion_pytorch_model.safetensors", "vae_1_0/model.safetensors"}


@pytest.mark.parametrize(("variant", "infix"), [(None, ""), ("fp16", ".fp16")])
def test_only_the_needed_files_are_downloaded(variant, infix, folder, monkeypatch):
    call = {}
    monkeypatch.setattr(files, "snapshot_download", lambda name, **kw: call.update(kw, name=name) or str(folder))
    ModelLoader("stabilityai/sdxl", variant=variant).origin("vae")
    weights = {each: {f"{part}/{STEMS[part]}{each}.safetensors" for part in STEMS} for each in ("", ".fp16")}
    patterns = {name: call[name] for name in ("allow_patterns", "ignore_patterns")}
    there = sorted({*SETTINGS, *OTHERS, *weights[""], *weights[".fp16"]})
    assert set(filter_repo_objects(there, **patterns)) == SETTINGS | weights[infix]


@pytest.mark.parametrize(
    ("missing", "part", "message"),
    [
        ("vae", "vae", "could not be loaded"),
        (VAE_WEIGHTS, "vae", r"no file named diffusion_pytorch_model\.safetensors"),
        ("text_encoder_2", "text_encoder_2", "has no folder text_encoder_2"),
        ("tokenizer", "tokenizer", "has no folder tokenizer"),
    ],
)
def test_a_missing_part_is_named(missing, part, message, copied, checkpoint):
    gone = copied / missing
    gone.rename(gone.with_name("gone"))
    with pytest.raises(ModelError, match=message) as caught:
        identities(ModelLoader(str(copied)))
    assert caught.value.part == part
    if part == "text_encoder_2":  # neither is it the config of a checkpoint
        with pytest.raises(ModelError, match=r"has no folder text_encoder_2\. .*or set model\.family"):
            ModelLoader(str(checkpoint), config=str(copied)).text(F32)


@pytest.mark.parametrize(
    ("part", "name", "of_file"),
    [
        ("vae", "encoder.conv_in.bias", "first_stage_model.encoder.conv_in.bias"),
        ("text_encoder", "layers.0.layer_norm1.bias", "conditioner.embedders.0.*layers.0.layer_norm1.bias"),
        ("text_encoder_2", "layers.0.layer_norm1.bias", "conditioner.embedders.1.*ln_1.bias"),
    ],
)
def test_missing_weights_are_refused_and_not_made_up(part, name, of_file, parts, copied, tmp_path):
    weights = copied / part / f"{STEMS[part]}.safetensors"
    start, _, end = of_file.partition("*")
    file = save_checkpoint(parts, tmp_path / "model.safetensors")
    loaders = (ModelLoader(str(copied)), ModelLoader(str(file), config=str(copied)))
    for path, begin, ending in ((weights, "", name), (file, start, end)):
        tensors = load_file(path)
        del tensors[next(each for each in tensors if each.startswith(begin) and each.endswith(ending))]
        save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"lacks 1 of the weights.*{name}"):
        loaders[0].identity(part, F32)
    with pytest.raises(ModelError, match=str(file)):
        loaders[1].identity(part, F32)


def test_a_torn_file_is_refused_and_the_releases_of_an_old_trainer_named(copied, monkeypatch):
    for name in (VAE_WEIGHTS, "text_encoder/model.safetensors"):
        os.truncate(copied / name, 1000)
    loader = ModelLoader(str(copied))
    with pytest.raises(ModelError, match=r"vae: .* could not be loaded"):
        loader.vae(F32)
    with pytest.raises(ModelError, match=r"text_encoder: .* could not be loaded"):
        loader.text(F32)
    asks = ["transformers>=999; extra == 'encode'", "diffusers>=0.1; extra == 'encode'", "ray>=999; extra == 'ray'"]
    monkeypatch.setattr(metadata, "requires", lambda name: asks)
    had = f"This environment has transformers {metadata.version('transformers')} \\(needs >=999\\). Encode in another"
    with pytest.raises(ModelError, match=had):
        loader.vae(F32)


def test_threads_that_load_leave_the_libraries_verbosity_as_it_was():
    def load(may_end: threading.Event) -> None:
        with files.loading("vae", "a folder"):
            may_end.wait(60)

    before, ends = diffusers_logging.get_verbosity(), [threading.Event(), threading.Event()]
    threads = [threading.Thread(target=load, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
        thread.join(0.3)  # both are loading by now, or one waits for the other
    for thread, end in zip(threads, ends, strict=True):
        end.set()
        thread.join(60)
    assert diffusers_logging.get_verbosity() == before


# The tiny SDXL with trained weights.

DIGESTS = {
    "vae": "777a244d4261306066df340797e36db71104b2239c36839dd936f2e58604ce36",
    "text_encoder": "754ee2ec18ff9c6c9b3d799e5bb3cef41992bb340cb2bb6462043cf09f87f39c",
    "text_encoder_2": "c591851ef0e275bc03510df4fa6c3b78f57303dba1ffc11ae6d56ae72aa7b466",
    "unet": "30f0e4fbb826aafab7435a316b2faf9fe3f1ea9dbf487a2885ce82844ced3976",
}
"""Of all weights as they are loaded: the digest of a VAE's identity leaves its decoder out."""


def test_tiny_photos_has_the_weights_that_were_trained_by_its_name_and_its_folder():
    pipe, named, folder = tiny_photos_pipeline(), ModelLoader("tiny-photos"), ModelLoader(str(files.TINY_PHOTOS_FOLDER))
    assert {part: weights_digest("all weights", getattr(pipe, part), F32) for part in DIGESTS} == DIGESTS
    assert identities(named) == identities(folder) and named.origin("vae") == "tiny-photos"
    assert ModelLoader("tiny", vae="tiny-photos").identity("vae", F32) == named.identity("vae", F32)
    unet = load_denoiser(dtype=F32, model=ModelConfig(path="tiny-photos"))
    assert weights_digest("all weights", unet, F32) == DIGESTS["unet"]
    assert load_scheduler(model=ModelConfig(path="tiny-photos")).config.prediction_type == "v_prediction"
    sizes = [path.stat().st_size for path in files.TINY_PHOTOS_FOLDER.rglob("*") if path.is_file()]
    assert 0 < sum(sizes) <= 4_000_000, "the package stays small"
    # transformers 5.5, which OneTrainer and ai-toolkit pin, finds no weight of CLIPTextModel by another name.
    for part in ("text_encoder", "text_encoder_2"):
        names = load_file(files.TINY_PHOTOS_FOLDER / part / "model.safetensors")
        assert {name.partition(".")[0] for name in names} <= {"text_model", "text_projection"}


# `model.revision`: a hub model as it was at a commit, a tag or a branch.


OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def hub(tmp_path: Path, add_to_hub: Callable[..., None]) -> str:
    """A hub cache with two commits of one model, of other weights: `main` is NEW, and the tag `v1` is OLD."""
    for number, family, commit, ref in ((1, "sd15", OLD, "v1"), (2, "sdxl", NEW, "main")):
        folder, unet = Path(shutil.copytree(tiny_folder(family), tmp_path / commit)), tiny_denoiser(family)
        torch.nn.init.constant_(unet.conv_in.bias, number)
        unet.save_pretrained(folder / "unet")
        settings = {"_class_name": "DDIMScheduler", "beta_start": number / 1000}
        (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(settings))
        add_to_hub("model", folder, commit, ref)
    return "someone/model"


@pytest.mark.parametrize(("revision", "commit"), [(None, NEW), ("v1", OLD)])
def test_every_part_is_that_of_the_revision(
    make_config: Callable[..., Config], hub: str, tmp_path: Path, revision: str | None, commit: str
) -> None:
    config = make_config(**{"model.path": hub, "model.revision": revision})
    report = run_precache(config)
    assert report.placement["family"].startswith("sd15:" if commit == OLD else "sdxl:")
    with LatentCache(config.cache.path) as cache:
        records = [cache.store.record(key) for key in cache.store.keys()]
    assert {name for each in records for name in each.provenance["models"].values()} == {f"{hub}@{commit}"}
    number = 1 if commit == OLD else 2
    unet = load_denoiser(dtype=torch.float32, model=config.model)
    assert set(unet.conv_in.bias.tolist()) == {number}
    assert load_scheduler(model=config.model).config.beta_start == number / 1000
    # Weights of a training take their architecture from the model: that of the other family does not fit.
    unet.save_pretrained(tmp_path / "trained")
    (tmp_path / "trained" / "config.json").unlink()
    file = tmp_path / "trained" / "diffusion_pytorch_model.safetensors"
    again = load_denoiser(file, dtype=torch.float32, model=config.model)
    assert again.config.cross_attention_dim == unet.config.cross_attention_dim


def test_a_revision_that_there_is_not_is_an_error(make_config: Callable[..., Config], hub: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="someone/model at revision 'v9'"):
        run_precache(make_config(**{"model.path": hub, "model.revision": "v9"}))
    (file := tmp_path / "model.safetensors").touch()
    for path in ("tiny", "tiny-photos", str(tmp_path), str(file), "missing.safetensors"):
        with pytest.raises(ValueError, match=r"revision is 'v1', but .* is not a hub id"):
            ModelConfig(path=path, revision="v1")
