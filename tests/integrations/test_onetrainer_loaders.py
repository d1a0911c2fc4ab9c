"""OneTrainer's loaders of other families than SDXL: the modules before the text cache, as the loaders make them.

`onetrainer_families.json` is what each loader's `_preparation_modules` and `_cache_modules` gave, without training text
encoders, at the commits that it names. {"object": name} stands for what the trainer loads, {"function": name} for a
function that makes the messages of a chat template.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import pipeline_host
from helpers.tiny_models import tiny_model

from latentcache.integrations.onetrainer.description import describe
from latentcache.integrations.onetrainer.upstream import RECOGNISED

RECORDED: dict[str, Any] = json.loads(
    Path(pipeline_host.__file__).with_name("onetrainer_families.json").read_text(encoding="utf-8")
)["families"]


def messages(caption: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": caption}]


def loaded(name: str, parts: dict[str, Any]) -> Any:
    """What the trainer has under this name."""
    if name.endswith("autocast_context"):
        return nullcontext()
    if name.endswith("train_dtype"):
        return torch.float32
    if name.endswith("embeddings_to_prompt"):
        return lambda prompt: prompt
    return parts[name] if name in parts else parts[name.removesuffix("_1")]


def value(recorded: Any, parts: dict[str, Any]) -> Any:
    if isinstance(recorded, list):
        return [value(each, parts) for each in recorded]
    if isinstance(recorded, dict) and len(recorded) == 1 and recorded.keys() <= {"object", "function"}:
        return messages if "function" in recorded else loaded(recorded["object"], parts)
    return recorded


@pytest.mark.families
@pytest.mark.parametrize("family", sorted(RECORDED))
def test_every_module_is_known_and_each_of_its_settings_is_read(pipeline: SimpleNamespace, family: str) -> None:
    parts = tiny_model(family)
    for name, recorded in RECORDED[family]["modules"]:
        assert name in RECOGNISED
        module = pipeline.make(name, **{key: value(each, parts) for key, each in recorded.items()})
        if name != "MapData":  # what it gives is a text, which counts as it is
            assert describe(module, {})["settings"].keys() >= recorded.keys()
