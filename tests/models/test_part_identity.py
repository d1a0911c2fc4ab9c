"""What counts in the identity of a part, and what does not: a key is made of it.

A bit of any weight and a setting of each part: see tests/precache/test_staleness.py.
"""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from helpers.tiny_models import tiny_encoders
from safetensors.torch import load_file, save_file
from same_models import F16, F32, identities
from single_file import save_checkpoint
from transformers import CLIPTokenizer

from latentcache.errors import ModelError
from latentcache.families import family_named
from latentcache.models.model_loader import LoadedModels, ModelLoader
from latentcache.models.tiny import tiny_parts


def test_what_counts_of_a_tokenizer(parts):
    def identity(tokenizer):
        return LoadedModels(tokenizer=tokenizer).identity("tokenizer", F32)

    tokenizer = copy.deepcopy(parts["tokenizer"])
    before = identity(tokenizer)
    tokenizer(["a", "much longer text"], padding="max_length", max_length=9, truncation=True)
    assert identity(tokenizer) == before, "its use does not"
    tokenizer.add_tokens(["<my-style>"])
    seen = {before, identity(tokenizer)}
    (tokenizer := copy.deepcopy(parts["tokenizer"])).pad_token = "!"
    seen.add(identity(tokenizer))
    assert len(seen) == 3
    vocab = {**parts["tokenizer"].get_vocab(), "ab": 514}
    plain, merged = (identity(CLIPTokenizer(vocab=vocab, merges=merges)) for merges in ([], [("a", "b")]))
    assert plain.weights != merged.weights and plain.config == merged.config


@pytest.mark.parametrize(
    ("part", "key", "value", "counts"),
    [
        ("vae", "a_key_of_the_future", 1, False),
        ("vae", "scaling_factor", 0.5, False),
        ("vae", "up_block_types", ("UpDecoderBlock2D",), False),
        ("text_encoder", "eos_token_id", 2, True),
        ("text_encoder", "dropout", 0.1, True),  # as keys of SDXL have it
        ("text_encoder", "transformers_version", "9", False),
    ],
)
def test_a_key_of_the_config_counts_if_the_family_names_it(part, key, value, counts):
    parts = tiny_parts()
    before = LoadedModels(**parts).identity(part, F32)
    if part == "vae":
        parts[part].register_to_config(**{key: value})
    else:
        setattr(parts[part].config, key, value)
    after = LoadedModels(**parts).identity(part, F32)
    assert (after != before) == counts
    assert after.weights == before.weights


def test_published_configs_have_the_keys_that_they_had():
    """With settings that no release fills in by itself: `dropout` of CLIP, and the special tokens of Qwen3."""
    clip, qwen = tiny_parts()["text_encoder"], tiny_encoders("z-image")["text_encoder"]
    clip.config.dropout = 0.0
    found = LoadedModels(text_encoder=clip).identity("text_encoder", F32)
    assert found.config == "ce49a7b4907ceac95087d1d3875edbea4994731db219f204bb623f07138dfaea"
    qwen.config.bos_token_id, qwen.config.eos_token_id, qwen.config.pad_token_id = 1, 2, 3
    found = LoadedModels(family=family_named("z-image"), text_encoder=qwen).identity("text_encoder", F32)
    assert found.config == "4f0c2a62a6c78926758d200df188ea479c616e1cc65f36a07541d052bc320b81"


def test_what_counts_of_a_vae_in_use():
    """Tiles and the encoder; neither slices nor the decoder."""
    vae = tiny_parts()["vae"]
    models = LoadedModels(vae=vae)
    before = models.identity("vae", F32)
    vae.enable_slicing()
    with torch.no_grad():
        vae.decoder.conv_out.weight += 1
        vae.post_quant_conv.weight += 1
    assert models.identity("vae", F32) == before
    vae.enable_tiling()
    assert models.identity("vae", F32) != before
    vae.disable_tiling()
    with torch.no_grad():
        vae.quant_conv.weight += 1
    assert models.identity("vae", F32) != before


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of peft itself
def test_adapters_are_refused_until_they_are_merged():
    peft = pytest.importorskip("peft")
    encoder = tiny_parts()["text_encoder"]
    before = LoadedModels(text_encoder=encoder).identity("text_encoder", F32)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(encoder, config).requires_grad_(False)
    with pytest.raises(ModelError, match=r"q_proj has adapters \(default\).*merge_and_unload"):
        LoadedModels(text_encoder=wrapped.base_model.model).identity("text_encoder", F32)
    merged = wrapped.merge_and_unload()
    assert LoadedModels(text_encoder=merged).identity("text_encoder", F32) != before


def test_strides_ties_and_the_layout_of_a_release_do_not_count():
    encoder = tiny_parts()["text_encoder"]
    before = LoadedModels(text_encoder=encoder).identity("text_encoder", F32)
    # transformers before 5.6 has all of it in `text_model`: text keys of SDXL would depend on the release.
    older = type("CLIPTextModel", (torch.nn.Module,), {})()
    older.config, older.text_model = encoder.config, getattr(encoder, "text_model", encoder)
    assert LoadedModels(text_encoder=older).identity("text_encoder", F32) == before
    (first,) = (module for name, module in encoder.named_modules() if name.endswith("encoder.layers.0"))
    layer = first.mlp.fc1
    layer.weight = torch.nn.Parameter(layer.weight.data.T.contiguous().T, requires_grad=False)
    # Two equal tensors that share memory, where there were two copies.
    first.layer_norm2.weight = first.layer_norm1.weight
    assert LoadedModels(text_encoder=encoder).identity("text_encoder", F32) == before


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


def test_weights_under_other_names_are_refused_and_not_left_out():
    """Their digest would be that of nothing: one key for all of them."""
    encoder = tiny_encoders("krea2")["text_encoder"]
    wrapped = torch.nn.Module()
    wrapped.config, wrapped.model = encoder.config, encoder
    with pytest.raises(ModelError, match="no weight of Module has a name that begins with 'language_model"):
        LoadedModels(family=family_named("krea2"), text_encoder=wrapped).identity("text_encoder", F32)
    assert LoadedModels(family=family_named("krea2"), text_encoder=encoder).identity("text_encoder", F32)
