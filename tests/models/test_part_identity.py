"""What counts in the identity of a part, and what does not: a key is made of it.

A bit of any weight and a setting of each part: see tests/precache/test_staleness.py.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.tiny_models import tiny_encoders, tiny_model
from safetensors.torch import load_file, save_file
from single_file import F16, F32, identities, save_checkpoint
from transformers import CLIPTokenizer

from latentcache.errors import ModelError
from latentcache.families import FamilyName, family_named
from latentcache.models import part_identity
from latentcache.models.model_loader import LoadedModels, ModelLoader
from latentcache.models.tiny import tiny_parts
from latentcache.phases.phases import Phases


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
    (tokenizer := copy.deepcopy(parts["tokenizer"])).split_special_tokens = True
    seen.add(identity(tokenizer))
    assert len(seen) == 4
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


def test_a_forward_of_another_module_is_refused():
    """kohya's networks and LyCORIS replace forwards, and leave the encoder's own weights frozen."""
    encoder = tiny_parts()["text_encoder"]
    layer = next(module for name, module in encoder.named_modules() if name.endswith("q_proj"))

    class Network(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 2 * plain(rows)

    plain, layer.forward = layer.forward, Network().forward
    with pytest.raises(ModelError, match=r"q_proj runs the forward of a Network.*Merge that, or remove it"):
        LoadedModels(text_encoder=encoder).identity("text_encoder", F32)
    layer.forward = plain
    assert LoadedModels(text_encoder=encoder).identity("text_encoder", F32)


def test_a_compiled_module_that_a_phase_runs_eagerly_is_no_other():
    """The wrapper of `torch.compile` then runs the forward of the module inside."""
    vae = tiny_parts()["vae"].requires_grad_(False)
    before = LoadedModels(vae=vae).identity("vae", F32)
    vae.decoder = torch.compile(vae.decoder, backend="eager")
    with Phases({"vae": vae}, device="cpu").enter("validate"):
        assert LoadedModels(vae=vae).identity("vae", F32) == before


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


# The settings of a text encoder that count: those of its family, whatever release completed its config.
# `encoder_configs.json` holds published configs as transformers 5.23.0 completes them, and what 5.0.0 and 5.5.4
# complete otherwise: `AutoConfig.for_model(model_type, **config).to_dict()`.

RECORDED = json.loads((Path(__file__).parent / "data" / "encoder_configs.json").read_text(encoding="utf-8"))
ENCODERS: dict[FamilyName, tuple[str, str]] = {
    "flux": ("text_encoder_2", "t5"),
    "chroma": ("text_encoder", "t5"),
    "wan": ("text_encoder", "umt5"),
    "qwen-image": ("text_encoder", "qwen2_5_vl"),
    "qwen-image-edit": ("text_encoder", "qwen2_5_vl"),
    "krea2": ("text_encoder", "qwen3_vl"),
    "flux2-dev": ("text_encoder", "mistral3"),
    "qwen-image-21": ("text_encoder", "qwen3_vl"),
    "qwen-image-21-edit": ("text_encoder", "qwen3_vl"),
    "ernie-image": ("text_encoder", "mistral3"),
    "ideogram4": ("text_encoder", "qwen3_vl"),
}
FROZEN = {
    ("sdxl", "text_encoder"): "604264777860b5ba8e46b5bfc6a78e56608ca09647c69e538f974fed2505668b",
    ("sdxl", "text_encoder_2"): "73ca08c19fbd65feac2b0efc7751175b0f3581d320b235aed64a9625a5bd2852",
    ("sdxl", "tokenizer"): "7815b869bdfa2cfdc8a9d9da27b091625baecde5935244a8ab71f5daab5fb740",
    ("sdxl", "tokenizer_2"): "c2cbef877158925bdf56635f56a00231dfc17772ca8a4c7949c3c88673573ae3",
    ("sd15", "text_encoder"): "604264777860b5ba8e46b5bfc6a78e56608ca09647c69e538f974fed2505668b",
    ("sd15", "tokenizer"): "7815b869bdfa2cfdc8a9d9da27b091625baecde5935244a8ab71f5daab5fb740",
    ("z-image", "text_encoder"): "85b0e3fd30467657e8bb0338babf93c1e9d51f5c5b4ff638302668bbbf3dea18",
    ("z-image", "tokenizer"): "c1975aa6da66f8bff9e6ddd5ea041169bb509222c7510601688dfde1a47de609",
    ("flux2", "text_encoder"): "c89b1b77d025c899a2ca106ca5d53699e7187f3cc978b47d5ebb963cebdf39c4",
    ("flux2", "tokenizer"): "c1975aa6da66f8bff9e6ddd5ea041169bb509222c7510601688dfde1a47de609",
    ("anima", "text_encoder"): "8a83f717455e9b15243158de9c5320f0c98d1260bea7f3ac0f1c2324dd8f2d17",
    ("anima", "text_conditioner"): "97df37dc0327bbe7bac47a43aa7d330c7ce4c7a74c74c8b63ab3df6d11ef4371",
    ("anima", "tokenizer"): "c1975aa6da66f8bff9e6ddd5ea041169bb509222c7510601688dfde1a47de609",
    ("qwen-image-21", "text_encoder"): "e83197ab54b196862525a925388e483416940cc940d4347c2b8108dfc0daff4a",
    ("qwen-image-21", "processor"): "c1975aa6da66f8bff9e6ddd5ea041169bb509222c7510601688dfde1a47de609",
    ("qwen-image-21", "vae"): "77bd607042d363d226b529fc59b9ae0079b9bbe35e1abedf766cf82db8829050",
    ("qwen-image-21-edit", "text_encoder"): "247a20833af7556eadb92d664aa59d8d0ccc50139bcebb4aa4974ab7162070e7",
}
"""Of the tiny models. What counts of their configs is the same in all releases, and their keys never change."""


def config_of(model: str, release: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = copy.deepcopy(RECORDED["configs"][model])
    for dotted, value in (RECORDED["differences"].get(release, {}).get(model, {}) | changes).items():
        section, (*outer, name) = config, dotted.split(".")
        for key in outer:
            section = section.setdefault(key, {})
        section.pop(name, None)
        section |= {} if value == "absent" else {name: value}
    return config


def digest_of(family_name: FamilyName, config: dict[str, Any]) -> str:
    """What a key has of an encoder with this config."""
    family, (part, _) = family_named(family_name), ENCODERS[family_name]
    (encoder := torch.nn.Module()).config = SimpleNamespace(to_dict=lambda: config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_identity, "weights_digest", lambda *_: "that of weights, which it does not have")
        return LoadedModels(family=family, **{part: encoder}).identity(part, torch.float32).config


@pytest.mark.parametrize("family", ENCODERS)
def test_a_release_of_transformers_changes_no_key(family: FamilyName) -> None:
    releases = ["5.23.0", *RECORDED["differences"]]
    assert len({digest_of(family, config_of(ENCODERS[family][1], release)) for release in releases}) == 1


T5 = {
    "num_heads": 32,
    "d_kv": 128,
    "dense_act_fn": "relu",
    "is_gated_act": False,
    "layer_norm_epsilon": 1e-5,
    "relative_attention_num_buckets": 64,
    "relative_attention_max_distance": 256,
}
TEXT = {
    "text_config.num_attention_heads": 14,
    "text_config.num_key_value_heads": 2,
    "text_config.hidden_act": "gelu",
    "text_config.rms_norm_eps": 1e-3,
    "text_config.rope_parameters.rope_theta": 10_000.0,
    "text_config.rope_parameters.rope_type": "yarn",
    "text_config.sliding_window": 4096,
}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"num_heads": 8, "window_size": 56, "fullatt_block_indexes": [7], "rope_parameters.rope_theta": 5e5},
    "qwen3_vl": {"num_heads": 8, "hidden_act": "gelu", "deepstack_visual_indexes": [5], "spatial_merge_size": 4}
    | {"rope_parameters.rope_theta": 5e5},
}
"""Settings of the part that reads images."""
READS_IMAGES = ("qwen-image-edit", "qwen-image-21-edit")


@pytest.mark.parametrize("family", ENCODERS)
def test_a_setting_that_changes_a_value_changes_the_key_and_no_other_does(family: FamilyName) -> None:
    model = ENCODERS[family][1]
    plain = digest_of(family, config_of(model, "5.23.0"))
    vision = {f"vision_config.{name}": value for name, value in VISION.get(model, {}).items()}
    vision |= {"image_token_id": 7} if vision else {}
    for name, value in ((T5 if model in ("t5", "umt5") else TEXT) | vision).items():
        is_other = digest_of(family, config_of(model, "5.23.0", **{name: value})) != plain
        assert is_other == (name not in vision or family in READS_IMAGES), name


def test_a_config_of_another_form_is_refused() -> None:
    config = config_of("qwen2_5_vl", "5.23.0")
    with pytest.raises(ModelError, match="none of the settings of 'text_config'"):
        digest_of("qwen-image", config | config.pop("text_config"))


@pytest.mark.parametrize(("family", "part"), FROZEN)
def test_keys_of_encoders_whose_configs_never_changed_stay(family: FamilyName, part: str) -> None:
    found = tiny_model(family)[part]
    if isinstance(found, torch.nn.Module):
        found.requires_grad_(False)
    models = LoadedModels(family=family_named(family), **{part: found})
    assert models.identity(part, torch.float32).config == FROZEN[family, part]
