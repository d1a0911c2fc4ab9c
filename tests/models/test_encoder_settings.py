"""The settings of a text encoder that count in its keys: those of its family, whatever release completed its config.

`encoder_configs.json` holds published configs as transformers 5.23.0 completes them, and what 5.0.0 and 5.5.4 complete
otherwise: `AutoConfig.for_model(model_type, **config).to_dict()`.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.tiny_models import tiny_model

from latentcache.errors import ModelError
from latentcache.families import FamilyName, family_named
from latentcache.models import part_identity
from latentcache.models.model_loader import LoadedModels

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
    "qwen2_5_vl": {"num_heads": 8, "window_size": 56, "fullatt_block_indexes": [7]},
    "qwen3_vl": {"num_heads": 8, "hidden_act": "gelu", "deepstack_visual_indexes": [5], "spatial_merge_size": 4},
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
