"""OneTrainer's loaders of other families than SDXL: the modules before the text cache, as the loaders make them.

`onetrainer_families.json` is what each loader's `_preparation_modules` and `_cache_modules` gave, without training text
encoders, at the commits that it names. {"object": name} stands for what the trainer loads, {"function": name} for a
function that makes the messages of a chat template.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import pipeline_host
from helpers.pipeline_sdxl import Run, Setup, concept
from helpers.tiny_models import tiny_model

from latentcache.integrations.onetrainer.description import describe
from latentcache.integrations.onetrainer.upstream import RECOGNISED

NUM = 4
RECORDED: dict[str, Any] = json.loads(
    Path(pipeline_host.__file__).with_name("onetrainer_families.json").read_text(encoding="utf-8")
)["families"]
EACH = pytest.mark.parametrize("family", sorted(RECORDED))
PRUNED = ("chroma", "qwen-image", "z-image", "krea2")


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


class LoaderRun(Run):
    """A run with the texts of a family's loader; images are SDXL's."""

    def __init__(self, setup: LoaderSetup):
        self.split_text = RECORDED[setup.family]["split_names"]
        encoders = [name for name in setup.parts if name.startswith("text_encoder")]
        self.encoders = {"vae": "encoder", **dict.fromkeys(encoders)}
        super().__init__(setup)

    def _texts(self) -> list[Any]:
        host, setup = self.setup.host, self.setup
        assert isinstance(setup, LoaderSetup)
        loading = [host.LoadMultipleTexts("text_path", "texts"), host.SelectRandomText("texts", "prompt")]
        return [*loading, *made(host, setup.family, setup.parts)]


class LoaderSetup(Setup):
    family: str

    def start(self, num_epochs: int = 1) -> Run:
        run = LoaderRun(self)
        for _ in range(num_epochs):
            run.next_epoch()
        return run


@pytest.mark.families
@EACH
def test_texts_of_the_loader_are_cached_and_come_back(
    family: str, tmp_path: Path, folder: Path, parts: dict[str, Any]
) -> None:
    """In mgds itself, with the family's tiny encoders: pruned texts have the rows of their own tokens."""
    for number, path in enumerate(sorted(folder.glob("*.txt"))):
        path.write_text(" ".join(["red"] * (2 + number)), encoding="utf-8")
    models = {"vae": parts["vae"]} | {
        name: part for name, part in tiny_model(family).items() if name.startswith(("text_encoder", "tokenizer"))
    }
    if family == "sd15" and not hasattr(models["text_encoder"], "text_model"):
        pytest.skip("mgds reads the final norm of `CLIPTextModel.text_model`, which this transformers does not have")
    encoders = Counter({name: NUM for name in models if name.startswith("text_encoder")})

    def start() -> Run:
        host = pipeline_host.host("mgds")
        setup = LoaderSetup(host, tmp_path / "cache", [concept(folder)], models, masks=True)
        setup.family = family
        return setup.start()

    first = start()
    assert first.encoded == Counter(vae=NUM) + encoders
    rows = []
    for item in first.by_photo().values():
        states, tokens = (next(item[name] for name in item if kind in name) for kind in ("hidden_state", "tokens"))
        rows.append(len(states))
        assert item["latent_mask"].shape[-2:] == item["latent_image"].shape[-2:]
        assert family == "flux" or len(states) == len(tokens) == len(item["tokens_mask"])
        assert family not in PRUNED or bool(item["tokens_mask"].bool().all())
    assert len(set(rows)) == (NUM if family in PRUNED else 1)
    again = start()
    assert again.encoded == Counter()
    for name, item in again.by_photo().items():
        for field, expected in first.by_photo()[name].items():
            if isinstance(expected, torch.Tensor):
                assert torch.equal(item[field], expected), field
    sorted(folder.glob("*.txt"))[0].write_text("another", encoding="utf-8")
    assert start().encoded == Counter(dict.fromkeys(encoders, 1))
