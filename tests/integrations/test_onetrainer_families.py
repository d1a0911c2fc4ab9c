"""What OneTrainer's loaders of other families add: pruned texts of natural length, chat templates, functions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.pipeline_sdxl import Run, Setup, concept
from helpers.tiny_models import clip_tokenizer

from latentcache.errors import PipelineError
from latentcache.integrations.onetrainer.description import describe

NUM = 4


def pruning(host: SimpleNamespace) -> Any:
    """mgds' PruneMaskedTokens, or what it does: it gives its inputs under their names, without masked rows."""
    if (kind := getattr(host, "PruneMaskedTokens", None)) is not None:
        return kind

    class PruneMaskedTokens(host.PipelineModule, host.RandomAccessPipelineModule):  # type: ignore[misc, name-defined]
        def __init__(self, tokens_name: str, tokens_mask_name: str, hidden_state_name: str):
            super().__init__()
            self.tokens_name, self.tokens_mask_name = tokens_name, tokens_mask_name
            self.hidden_state_name = hidden_state_name

        def length(self) -> int:
            return int(self._get_previous_length(self.tokens_name))

        def get_inputs(self) -> list[str]:
            return [self.tokens_name, self.tokens_mask_name, self.hidden_state_name]

        get_outputs = get_inputs

        def get_item(self, variation: int, index: int, requested_name: str | None = None) -> dict[str, Any]:
            found = {name: self._get_previous_item(variation, name, index) for name in self.get_inputs()}
            kept = found[self.tokens_mask_name].bool()
            return {name: value[kept] for name, value in found.items()}

    return PruneMaskedTokens


class PrunedSetup(Setup):
    """Its texts have the rows of their own tokens: 77 rows of the encoder, without those that are masked."""

    def start(self, num_epochs: int = 1) -> Run:
        run = PrunedRun(self)
        for _ in range(num_epochs):
            run.next_epoch()
        return run


class PrunedRun(Run):
    def _texts(self) -> list[Any]:
        prune = pruning(self.setup.host)
        return [*super()._texts(), prune("tokens_1", "tokens_mask_1", "text_encoder_1_hidden_state")]


def test_texts_of_natural_length_are_cached_and_come_back(
    pipeline: SimpleNamespace, tmp_path: Path, folder: Path, parts: dict[str, Any]
) -> None:
    for number, path in enumerate(sorted(folder.glob("*.txt"))):
        path.write_text(" ".join(["a"] * (2 + number)), encoding="utf-8")

    def start(name: str, **options: Any) -> Run:
        settings = {"host": pipeline, "cache_dir": tmp_path / name, "concepts": [concept(folder)], "parts": parts}
        return PrunedSetup(**settings, **options).start()

    first = start("cache")
    assert first.encoded == Counter(vae=NUM, text_encoder=NUM, text_encoder_2=NUM)
    rows = {name: len(item["tokens_1"]) for name, item in first.by_photo().items()}
    assert len(set(rows.values())) == NUM and max(rows.values()) < 77
    again = start("cache")
    assert again.encoded == Counter()
    for name, item in again.by_photo().items():
        other = first.by_photo()[name]
        assert len(item["text_encoder_1_hidden_state"]) == rows[name] and len(item["text_encoder_2_hidden_state"]) == 77
        for field, value in item.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other[field]), field


class Tokenize:
    """The settings of mgds' Tokenize of 2026."""

    def __init__(
        self,
        tokenizer: Any,
        apply_chat_template: Callable[..., Any] | None = None,
        apply_chat_template_kwargs: Any = None,
    ):
        self.tokenizer, self.apply_chat_template = tokenizer, apply_chat_template
        self.apply_chat_template_kwargs = apply_chat_template_kwargs

    def get_outputs(self) -> list[str]:
        return ["tokens"]


SYSTEM = "Describe it."


def _messages(caption: str, role: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": role, "content": caption}]


def with_role(role: str) -> Callable[[str], Any]:
    return lambda caption: _messages(caption, role)


def test_a_chat_template_and_the_function_that_makes_its_messages_count(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = clip_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    settings = {"enable_thinking": True}
    first = describe(Tokenize(tokenizer, with_role("user"), settings), {})
    assert first == describe(Tokenize(clip_tokenizer_with(tokenizer.chat_template), with_role("user"), settings), {})
    others = [
        Tokenize(tokenizer, with_role("assistant"), settings),
        Tokenize(tokenizer, lambda caption: _messages(caption, "user"), settings),
        Tokenize(tokenizer, with_role("user"), {"enable_thinking": False}),
        Tokenize(clip_tokenizer_with("{{ messages[1].content }}"), with_role("user"), settings),
    ]
    assert all(describe(each, {}) != first for each in others)
    monkeypatch.setitem(globals(), "SYSTEM", "Another one.")
    assert describe(Tokenize(tokenizer, with_role("user"), settings), {}) != first
    plain = describe(Tokenize(tokenizer), {})
    assert "chat_template" not in plain["settings"]


def clip_tokenizer_with(template: str) -> Any:
    tokenizer = clip_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_functions_that_call_themselves_and_those_that_cannot_be_read() -> None:
    def count(text: str) -> int:
        return 0 if not text else 1 + count(text[1:])

    assert describe(Tokenize(clip_tokenizer(), count), {}) == describe(Tokenize(clip_tokenizer(), count), {})
    thing = object()
    with pytest.raises(PipelineError, match="'apply_chat_template' is a object, which cannot be written as JSON"):
        describe(Tokenize(clip_tokenizer(), lambda text: [text, thing]), {})


def test_functions_and_values_that_are_reached_through_a_module_count() -> None:
    own, inner = ModuleType("own_util"), ModuleType("own_util.texts")
    own.texts, inner.own = inner, own  # type: ignore[attr-defined]

    def described() -> Any:
        function = eval("lambda text: own.texts.messages(text) + json.dumps(own.ROLE)", {"own": own, "json": json})
        return describe(Tokenize(clip_tokenizer(), function), {})

    found = []
    for text, role in (("return 'a' + text", "user"), ("return 'b' + text", "user"), ("return 'b' + text", "system")):
        exec(f"def messages(text):\n    {text}", vars(inner))
        own.ROLE = role  # type: ignore[attr-defined]
        found.append(described())
        assert described() == found[-1]
    assert found[0] != found[1] != found[2]


def test_a_variable_that_is_not_there_yet_is_refused() -> None:
    def before() -> Any:
        try:
            return describe(Tokenize(clip_tokenizer(), lambda text: later + text), {})
        finally:
            later = ""

    with pytest.raises(PipelineError, match="'apply_chat_template' is a cell, which cannot be written as JSON"):
        before()


class EncodeQwenText:
    """mgds keeps one of its settings under another name."""

    def __init__(self, hidden_state_output_index: int | list[int]):
        index = hidden_state_output_index
        self.hidden_state_indexes = index if isinstance(index, list) else [index]

    def get_outputs(self) -> list[str]:
        return ["hidden_state"]


def test_the_layers_of_an_encoder_count() -> None:
    first, other = describe(EncodeQwenText(-2), {}), describe(EncodeQwenText([9, 18, 27]), {})
    assert first["settings"] == {"hidden_state_output_index": [-2]} != other["settings"]
