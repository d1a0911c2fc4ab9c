"""OneTrainer's loaders of other families than SDXL: the modules before the text cache, as the loaders make them.

`onetrainer_families.json` is what each loader's `_preparation_modules` and `_cache_modules` gave, without training text
encoders, at the commits that it names. {"object": name} stands for what the trainer loads, {"function": name} for a
function that makes the messages of a chat template.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
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
EACH = pytest.mark.parametrize("family", sorted(RECORDED))


def messages(caption: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": caption}]


def without_embeddings(prompt: str) -> str:
    return prompt


def objects(parts: dict[str, Any]) -> dict[str, Any]:
    """What the trainer loads, by its name there."""
    named = {f"{name}_1": parts[name] for name in ("text_encoder", "tokenizer")}
    named |= {name: part for name, part in parts.items() if name.startswith(("text_encoder", "tokenizer"))}
    contexts = dict.fromkeys(("autocast_context", "text_encoder_autocast_context", "text_encoder_2_autocast_context"))
    dtypes = ("train_dtype", "text_encoder_train_dtype", "text_encoder_2_train_dtype")
    maps = (f"add_text_encoder{number}_embeddings_to_prompt" for number in ("", "_1", "_2"))
    return (
        named
        | {name: nullcontext() for name in contexts}
        | dict.fromkeys(dtypes, torch.float32)
        | dict.fromkeys(maps, without_embeddings)
    )


def value(recorded: Any, known: dict[str, Any]) -> Any:
    if isinstance(recorded, list):
        return [value(each, known) for each in recorded]
    if isinstance(recorded, dict) and len(recorded) == 1 and recorded.keys() <= {"object", "function"}:
        return messages if "function" in recorded else known[recorded["object"]]
    return recorded


def made(host: SimpleNamespace, family: str, parts: dict[str, Any]) -> Iterator[Any]:
    """The recorded modules. Where the host lacks one, it is an object of that name with the settings that it keeps."""
    for name, recorded in RECORDED[family]["modules"]:
        settings = {key: value(each, objects(parts)) for key, each in recorded.items()}
        yield getattr(host, name)(**settings) if host.name == "mgds" else keeping(name, settings)


def keeping(name: str, settings: dict[str, Any]) -> Any:
    """An object of a class of this name. mgds' modules keep one setting under another name."""

    class Keeping:
        def __init__(self, **given: Any):
            layers = given.pop("hidden_state_output_index", None)
            if name in ("EncodeQwenText", "EncodeMistralText"):
                self.hidden_state_indexes = layers if isinstance(layers, list) else [layers]
            elif layers is not None:
                self.hidden_state_output_index = layers
            vars(self).update(given)

        def get_outputs(self) -> list[str]:
            return [each for setting, each in settings.items() if setting.endswith("out_name")]

    parameters = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in ("self", *settings)]
    Keeping.__init__.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    Keeping.__name__ = name
    return Keeping(**settings)


@pytest.mark.families
@EACH
def test_every_module_is_known_and_each_of_its_settings_is_read(pipeline: SimpleNamespace, family: str) -> None:
    for module, (name, recorded) in zip(
        made(pipeline, family, tiny_model(family)), RECORDED[family]["modules"], strict=True
    ):
        assert name in RECOGNISED
        if name != "MapData":  # what it gives is a text, which counts as it is
            assert describe(module, {})["settings"].keys() >= recorded.keys()
