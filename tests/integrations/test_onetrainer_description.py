"""What modules and the parts of a model are by: weights, layers that are hooked in, functions, chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from latentcache.integrations.onetrainer.description import describe, part_identity
from latentcache.models.tiny import tiny_part


def test_tensors_that_a_hooked_layer_has_not_registered_count() -> None:
    """A trainer's extra embeddings, in a list that torch knows nothing of."""

    class Embeddings(torch.nn.Module):
        def __init__(self, extra: list[torch.Tensor]):
            super().__init__()
            self.extra = extra

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.cat(self.extra)[tokens]

    def hooked(value: float) -> tuple[torch.nn.Module, torch.Tensor]:
        encoder, extra = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.full((2, 2), value)
        torch.nn.init.ones_(encoder[0].weight), torch.nn.init.zeros_(encoder[0].bias)
        encoder[0].forward = Embeddings([extra]).forward  # type: ignore[method-assign]
        return encoder, extra

    (one, extra), (same, _), (other, _) = hooked(1.0), hooked(1.0), hooked(1.1)
    first = part_identity("text_encoder", one)
    assert first == part_identity("text_encoder", same) != part_identity("text_encoder", other)
    extra.mul_(1.1)
    assert part_identity("text_encoder", one) == part_identity("text_encoder", other)


@pytest.mark.parametrize("hooked", [False, True])
def test_weights_that_differ_below_the_precision_of_others_are_told_apart(hooked: bool) -> None:
    """Of a part with several dtypes, or of a float32 LoRA on a float16 encoder, nothing is rounded."""

    def part(value: float) -> torch.nn.Module:
        layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).half()
        with torch.no_grad():
            for parameter in layers.parameters():
                parameter.fill_(0.1)
        fine = torch.nn.Linear(2, 2)
        with torch.no_grad():
            for parameter in fine.parameters():
                parameter.fill_(value)
        if hooked:
            layers[1].forward = fine.forward  # type: ignore[method-assign]
        else:
            layers[1] = fine
        return layers

    rounded = float(torch.tensor(0.1).half())
    one, same, other = part(rounded), part(rounded), part(rounded + 1e-6)
    assert part_identity("text_encoder", one) == part_identity("text_encoder", same)
    assert part_identity("text_encoder", one) != part_identity("text_encoder", other)


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
    tokenizer = tiny_part("tokenizer")
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
    tokenizer = tiny_part("tokenizer")
    tokenizer.chat_template = template
    return tokenizer


def test_functions_and_values_that_are_reached_through_a_module_count() -> None:
    own, inner = ModuleType("own_util"), ModuleType("own_util.texts")
    own.texts, inner.own = inner, own  # type: ignore[attr-defined]

    def described() -> Any:
        function = eval("lambda text: own.texts.messages(text) + json.dumps(own.ROLE)", {"own": own, "json": json})
        return describe(Tokenize(tiny_part("tokenizer"), function), {})

    found = []
    for text, role in (("return 'a' + text", "user"), ("return 'b' + text", "user"), ("return 'b' + text", "system")):
        exec(f"def messages(text):\n    {text}", vars(inner))
        own.ROLE = role  # type: ignore[attr-defined]
        found.append(described())
        assert described() == found[-1]
    assert found[0] != found[1] != found[2]
