from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from single_file import save_checkpoint, save_vae
from transformers import CLIPTokenizer

from latentcache.encoders import sources
from latentcache.encoders.clip import encode_captions
from latentcache.encoders.models import PARTS, LoadedModels, ModelLoader, placed
from latentcache.encoders.tiny import save_diffusers_folder, tiny_sdxl
from latentcache.encoders.vae import encode_images
from latentcache.errors import ModelError, TrainableEncoderError

F16, F32 = torch.float16, torch.float32
PIXELS = torch.arange(2 * 32 * 32 * 3).remainder(251).to(torch.uint8).reshape(2, 32, 32, 3)


@pytest.fixture(params=["tiny", "folder", "checkpoint", "loaded"])
def models(request, parts, folder, checkpoint):
    """The same weights in each form that they can come in."""
    return {
        "tiny": lambda: ModelLoader("tiny"),
        "folder": lambda: ModelLoader(str(folder)),
        "checkpoint": lambda: ModelLoader(str(checkpoint), config=str(folder)),
        "loaded": lambda: LoadedModels(**parts),
    }[request.param]()


def identities(models, dtype=F32):
    return {part: models.identity(part, dtype) for part in PARTS}


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
        text = models.text(dtype)
        for module in (models.vae(dtype), text.text_encoder, text.text_encoder_2):
            assert not module.training
            assert {(p.device.type, p.dtype, p.requires_grad) for p in module.parameters()} == {("cpu", dtype, False)}
    assert models.identity("vae", F16) != models.identity("vae", F32)


def test_all_forms_know_the_config_of_the_vae(models):
    assert models.vae_config() == {
        "scaling_factor": 0.13025,
        "shift_factor": None,
        "force_upcast": True,
        "latent_channels": 4,
        "downscale_factor": 8,
    }


def test_all_forms_say_where_a_part_comes_from_and_refuse_other_parts(models):
    assert all(models.origin(part) for part in PARTS)
    with pytest.raises(ModelError, match="unet"):
        models.identity("unet", F32)


def test_release_forgets_and_the_next_call_gives_the_same(models):
    before = models.identity("vae", F16)
    models.release()
    assert models.identity("vae", F16) == before


# What counts for the identity.


@pytest.mark.parametrize("part", ["vae", "text_encoder", "text_encoder_2"])
def test_one_flipped_bit_of_the_weights_counts(part):
    models = LoadedModels(**(parts := tiny_sdxl()))
    before = identities(models)
    weights = next(parts[part].parameters()).data.view(torch.int32)
    weights.view(-1)[0] ^= 1
    after = identities(models)
    assert [name for name in PARTS if before[name] != after[name]] == [part]
    assert before[part].config == after[part].config


def test_the_merges_of_a_tokenizer_count(parts):
    vocab = {**parts["tokenizer"].get_vocab(), "ab": 514}
    plain, merged = (
        LoadedModels(tokenizer=CLIPTokenizer(vocab=vocab, merges=merges)).identity("tokenizer", F32)
        for merges in ([], [("a", "b")])
    )
    assert plain.weights != merged.weights
    assert plain.config == merged.config


@pytest.mark.parametrize("change", ["pad_token", "model_max_length", "added_token"])
def test_a_changed_tokenizer_counts(parts, change):
    tokenizer = copy.deepcopy(parts["tokenizer"])
    if change == "added_token":
        tokenizer.add_tokens(["<my-style>"])
    else:
        setattr(tokenizer, change, {"pad_token": "!", "model_max_length": 64}[change])
    changed = LoadedModels(tokenizer=tokenizer).identity("tokenizer", F32)
    assert changed != LoadedModels(**parts).identity("tokenizer", F32)


def test_the_use_of_a_tokenizer_does_not_count(parts):
    models = LoadedModels(**parts)
    before = models.identity("tokenizer", F32)
    parts["tokenizer"](["a", "much longer text"], padding="max_length", max_length=9, truncation=True)
    assert models.identity("tokenizer", F32) == before


@pytest.mark.parametrize(
    ("part", "key", "value", "counts"),
    [
        ("vae", "act_fn", "relu", True),
        ("vae", "norm_num_groups", 4, True),
        ("vae", "a_key_of_the_future", 1, True),
        ("vae", "scaling_factor", 0.5, False),
        ("vae", "sample_size", 1024, False),
        ("vae", "_name_or_path", "elsewhere", False),
        ("text_encoder", "hidden_act", "gelu", True),
        ("text_encoder", "eos_token_id", 2, True),
        ("text_encoder", "a_key_of_the_future", 1, True),
        ("text_encoder", "attention_dropout", 0.5, False),
        ("text_encoder", "architectures", ["Other"], False),
        ("text_encoder", "transformers_version", "9", False),
    ],
)
def test_a_key_of_the_config_counts_unless_it_is_known_not_to(part, key, value, counts):
    parts = tiny_sdxl()
    before = LoadedModels(**parts).identity(part, F32)
    if part == "vae":
        parts[part].register_to_config(**{key: value})
    else:
        setattr(parts[part].config, key, value)
    after = LoadedModels(**parts).identity(part, F32)
    assert (after != before) == counts
    assert after.weights == before.weights


def test_tiling_counts_and_slicing_does_not():
    vae = tiny_sdxl()["vae"]
    models = LoadedModels(vae=vae)
    before = models.identity("vae", F32)
    vae.enable_slicing()
    assert models.identity("vae", F32) == before
    vae.enable_tiling()
    assert models.identity("vae", F32) != before


def test_strides_and_ties_do_not_count():
    parts = tiny_sdxl()
    before = LoadedModels(**parts).identity("text_encoder", F32)
    encoder = parts["text_encoder"]
    layer = encoder.encoder.layers[0].mlp.fc1
    layer.weight = torch.nn.Parameter(layer.weight.data.T.contiguous().T, requires_grad=False)
    # Two equal tensors that share memory, where there were two copies.
    encoder.encoder.layers[0].layer_norm2.weight = encoder.encoder.layers[0].layer_norm1.weight
    assert LoadedModels(**parts).identity("text_encoder", F32) == before


def test_a_copied_and_renamed_folder_is_the_same_model(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "renamed")
    assert identities(ModelLoader(str(tmp_path / "renamed"))) == identities(ModelLoader(str(folder)))


def test_a_half_precision_checkpoint_is_another_model_than_the_single_precision_one(parts, folder, tmp_path):
    half = ModelLoader(str(save_checkpoint(parts, tmp_path / "half.safetensors", F16)), config=str(folder))
    full = ModelLoader(str(folder))
    for part in ("vae", "text_encoder", "text_encoder_2"):
        assert half.identity(part, F32) != full.identity(part, F32)
        assert half.identity(part, F16) == full.identity(part, F16)


def test_weights_with_the_old_prefix_are_the_same_model(folder, tmp_path):
    """The hub's SDXL names them `text_model.*`; transformers 5 has dropped that."""
    shutil.copytree(folder, tmp_path / "old")
    file = tmp_path / "old" / "text_encoder" / "model.safetensors"
    tensors = {f"text_model.{name.removeprefix('text_model.')}": value for name, value in load_file(file).items()}
    tensors["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    save_file(tensors, file, metadata={"format": "pt"})
    assert identities(ModelLoader(str(tmp_path / "old"))) == identities(ModelLoader(str(folder)))


# The memo.


def counting(method, counted: list[str]):
    def count(self, *args):
        counted.append(method.__name__)
        return method(self, *args)

    return count


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """What is loaded, as it happens."""
    counted: list[str] = []
    for source in (sources.FolderSource, sources.FileSource):
        for name in ("load_vae", "load_text_encoders", "load_tokenizers"):
            monkeypatch.setattr(source, name, counting(getattr(source, name), counted))
    return counted


@pytest.mark.parametrize("form", ["folder", "checkpoint"])
def test_an_unchanged_model_is_not_loaded_again(form, folder, checkpoint, loads):
    path, config = (str(folder), None) if form == "folder" else (str(checkpoint), str(folder))
    memo: dict[str, str] = {}
    first = identities(ModelLoader(path, config=config, memo=memo))
    assert set(loads) == {"load_vae", "load_text_encoders", "load_tokenizers"}
    loads.clear()
    again = ModelLoader(path, config=config, memo=json.loads(json.dumps(memo)))
    assert identities(again) == first
    assert again.vae_config()["scaling_factor"] == 0.13025
    assert loads == []


def test_a_part_is_loaded_once_for_identity_and_use(folder, loads):
    loader = ModelLoader(str(folder))
    for _ in range(2):
        identities(loader)
        loader.vae(F32), loader.text(F32)
    assert sorted(loads) == ["load_text_encoders", "load_tokenizers", "load_vae"]


def test_a_touched_file_is_read_again_and_a_changed_one_is_another_part(folder, tmp_path, loads):
    shutil.copytree(folder, tmp_path / "model")
    memo: dict[str, str] = {}
    path = str(tmp_path / "model")
    before = identities(ModelLoader(path, memo=memo))
    weights = tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors"
    os.utime(weights, ns=(1, 1))
    loads.clear()
    assert identities(ModelLoader(path, memo=memo)) == before
    assert loads == ["load_vae"]
    tensors = load_file(weights)
    tensors["encoder.conv_in.bias"][0] += 1
    save_file(tensors, weights)
    after = identities(ModelLoader(path, memo=memo))
    assert [part for part in PARTS if after[part] != before[part]] == ["vae"]


def test_an_unreadable_memo_is_made_anew(folder):
    memo: dict[str, str] = {}
    first = ModelLoader(str(folder), memo=memo).identity("vae", F32)
    for damage in ("{", "[]", '{"weights": "x"}'):
        memo = dict.fromkeys(memo, damage)
        assert ModelLoader(str(folder), memo=memo).identity("vae", F32) == first
        assert damage not in memo.values()


# A separate VAE.


@pytest.fixture(scope="module")
def other_vae():
    return tiny_sdxl(seed=7)["vae"]


@pytest.mark.parametrize("form", ["whole folder", "flat folder", "file with config", "file alone", "file, checkpoint"])
def test_a_separate_vae(form, other_vae, folder, checkpoint, tmp_path):
    path, config = str(folder), None
    if form == "whole folder":
        vae = save_diffusers_folder(tiny_sdxl(seed=7), tmp_path / "other")
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
    assert loader.vae_config()["scaling_factor"] == 0.13025
    assert loader.identity("text_encoder", F32) == ModelLoader("tiny").identity("text_encoder", F32)


def test_a_bare_vae_file_needs_a_config_from_somewhere(other_vae, tmp_path):
    file = save_vae(other_vae, tmp_path / "sdxl_vae.safetensors")
    with pytest.raises(ModelError, match=r"no config\.json beside it"):
        ModelLoader("tiny", vae=str(file)).vae(F32)


def test_another_class_of_vae_is_refused(other_vae, tmp_path):
    other_vae.save_pretrained(tmp_path / "taesd")
    config = tmp_path / "taesd" / "config.json"
    config.write_text(config.read_text().replace("AutoencoderKL", "AutoencoderTiny"))
    for call in (ModelLoader.vae_config, lambda loader: loader.vae(F32)):
        with pytest.raises(ModelError, match="AutoencoderTiny, but an AutoencoderKL is needed"):
            call(ModelLoader("tiny", vae=str(tmp_path / "taesd")))


def test_a_vae_with_statistics_per_channel_is_refused():
    vae = tiny_sdxl()["vae"]
    vae.register_to_config(latents_mean=[0.0] * 4)
    with pytest.raises(ModelError, match="latents_mean"):
        LoadedModels(vae=vae).vae_config()


# Refusals.


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_pickled_weights_are_refused_with_the_conversion(parts, folder, tmp_path):
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    (model / "vae" / "diffusion_pytorch_model.safetensors").rename(model / "vae" / "diffusion_pytorch_model.bin")
    with pytest.raises(ModelError, match=r"diffusion_pytorch_model\.bin.*save_pretrained") as caught:
        ModelLoader(str(model)).vae(F32)
    assert caught.value.part == "vae"


@pytest.mark.parametrize("name", ["model.ckpt", "model.bin", "model.pt"])
def test_a_pickled_checkpoint_is_refused(name, tmp_path):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match="is a pickle"):
        ModelLoader(str(tmp_path / name)).vae(F32)


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./sdxl", "nowhere.safetensors", "no/where.safetensors", "sdxl"])
def test_a_path_that_is_nothing_is_refused(path):
    with pytest.raises(ModelError, match="there is no file or folder"):
        ModelLoader(path).vae(F32)


def test_a_hub_id_that_is_not_in_the_cache_is_refused_offline(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"someone/sdxl is no local path.*Download it once while online"):
        ModelLoader("someone/sdxl").vae(F32)


@pytest.fixture
def hub_cache(folder, tmp_path, monkeypatch) -> Path:
    """A hub cache that holds the tiny model as someone/sdxl, and its VAE alone as someone/vae."""
    for name, content in (("sdxl", folder), ("vae", folder / "vae")):
        repository = tmp_path / f"models--someone--{name}"
        shutil.copytree(content, repository / "snapshots" / ("c0ffee" * 7)[:40])
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(("c0ffee" * 7)[:40])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_hub_id_in_the_cache_is_the_same_model_and_its_commit_is_its_origin(hub_cache, folder, checkpoint):
    expected = identities(ModelLoader(str(folder)))
    loader = ModelLoader("someone/sdxl", vae="someone/vae")
    assert identities(loader) == expected
    assert loader.origin("vae") == "someone/vae@" + ("c0ffee" * 7)[:40]
    assert loader.origin("tokenizer") == "someone/sdxl@" + ("c0ffee" * 7)[:40]
    assert identities(ModelLoader("someone/sdxl", vae="someone/sdxl")) == expected
    assert identities(ModelLoader(str(checkpoint), config="someone/sdxl")) == expected


# An excerpt of the files of stabilityai/stable-diffusion-xl-base-1.0.
SDXL_FILES = [
    ".gitattributes",
    "README.md",
    "model_index.json",
    "sd_xl_base_1.0.safetensors",
    "sd_xl_offset_example-lora_1.0.safetensors",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.fp16.safetensors",
    "text_encoder/model.onnx",
    "text_encoder/model.safetensors",
    "text_encoder_2/config.json",
    "text_encoder_2/model.fp16.safetensors",
    "text_encoder_2/model.safetensors",
    "text_encoder_2/openvino_model.bin",
    "tokenizer/merges.txt",
    "tokenizer/tokenizer_config.json",
    "tokenizer/vocab.json",
    "tokenizer_2/merges.txt",
    "tokenizer_2/vocab.json",
    "unet/config.json",
    "unet/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.fp16.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
    "vae_1_0/config.json",
    "vae_1_0/diffusion_pytorch_model.safetensors",
]


@pytest.mark.parametrize(("variant", "infix", "other"), [(None, "", ".fp16"), ("fp16", ".fp16", "")])
def test_only_the_needed_files_are_downloaded(variant, infix, other, folder, monkeypatch):
    asked = {}
    monkeypatch.setattr(sources, "snapshot_download", lambda name, **kw: asked.update(kw, name=name) or str(folder))
    ModelLoader("stabilityai/sdxl", variant=variant).origin("vae")
    wanted = set(
        filter_repo_objects(
            SDXL_FILES, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
        )
    )
    weights = {f"{part}/{stem}{infix}.safetensors" for part, stem in sources.WEIGHTS.items()}
    assert {name for name in wanted if name.endswith(".safetensors")} == weights
    settings = {"model_index.json", "text_encoder/config.json", "tokenizer/merges.txt", "tokenizer_2/vocab.json"}
    assert settings <= wanted
    assert not any(name.startswith(("unet", "vae_1_0", "sd_xl")) for name in wanted)
    assert f"vae/diffusion_pytorch_model{other}.safetensors" not in wanted


@pytest.mark.parametrize(
    ("missing", "part", "message"),
    [
        ("vae", "vae", "could not be loaded"),
        ("vae/diffusion_pytorch_model.safetensors", "vae", r"has no diffusion_pytorch_model\.safetensors"),
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


def test_a_checkpoint_whose_configs_are_not_sdxl_is_refused(checkpoint, folder, tmp_path):
    config = Path(shutil.copytree(folder, tmp_path / "config"))
    remove(config / "text_encoder_2")
    with pytest.raises(ModelError, match="has no text_encoder_2, which an SDXL checkpoint needs"):
        ModelLoader(str(checkpoint), config=str(config)).vae(F32)


def test_a_checkpoint_without_configs_needs_the_hub(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"Set model\.config to a local diffusers folder"):
        ModelLoader(str(checkpoint)).vae(F32)


# The caller's own modules.


@pytest.mark.parametrize("part", ["vae", "text_encoder", "text_encoder_2"])
def test_an_encoder_that_is_trained_is_refused(part):
    parts = tiny_sdxl()
    list(parts[part].parameters())[-1].requires_grad_(True)
    models = LoadedModels(**parts)
    for call in (lambda: models.identity(part, F32), lambda: (models.vae(F32), models.text(F32))):
        with pytest.raises(TrainableEncoderError, match="requires grad") as caught:
            call()
        assert caught.value.part == part


def test_the_callers_module_is_handed_out_as_it_is_or_copied_for_another_dtype(parts):
    models = LoadedModels(**parts)
    assert models.vae(F32) is parts["vae"]
    half = models.vae(F16)
    assert half is models.vae(F16)
    assert next(half.parameters()).dtype is F16
    assert next(parts["vae"].parameters()).dtype is F32


def test_a_part_that_was_not_given_is_named(parts):
    with pytest.raises(ModelError, match=r"text_encoder was not given \(given: vae\)"):
        LoadedModels(vae=parts["vae"]).text(F32)


def test_offloaded_weights_are_refused():
    vae = tiny_sdxl()["vae"].to("meta")
    with pytest.raises(ModelError, match="meta device"):
        LoadedModels(vae=vae).identity("vae", F32)


def test_placed_puts_device_and_training_flags_back():
    vae = tiny_sdxl()["vae"]
    vae.train()
    vae.decoder.eval()
    before = [child.training for child in vae.modules()]
    with pytest.raises(RuntimeError, match="stop"), placed(vae, torch.device("cpu")) as inside:
        assert not any(child.training for child in inside.modules())
        raise RuntimeError("stop")
    assert [child.training for child in vae.modules()] == before


def test_placed_refuses_a_module_on_several_devices():
    vae = tiny_sdxl()["vae"]
    vae.decoder.to("meta")
    with pytest.raises(ModelError, match="spread over cpu, meta"), placed(vae, torch.device("cpu")):
        pass
