"""The identity of modules and of model parts: weights, hooked layers, functions, chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import pipeline_host
from helpers.tiny_models import tiny_model

from latentcache.integrations.onetrainer.description import describe, part_identity
from latentcache.integrations.onetrainer.upstream import RECOGNISED
from latentcache.models.tiny import tiny_part

ROUNDED = float(torch.tensor(0.1).half())


def linear(value: float) -> torch.nn.Linear:
    layer = torch.nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(value)
    return layer


class Hooked(torch.nn.Module):
    """A trainer's layer that replaces another one's forward, with a tensor that is not registered."""

    def __init__(self, value: float = ROUNDED, extra: float = 1.0, alpha: float = 1.0):
        super().__init__()
        self.lora, self.extra, self.alpha = linear(value), [torch.full((2, 2), extra)], alpha

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.alpha * self.lora(self.extra[0][tokens])


def encoder(hooked: Hooked | None = None, value: float = ROUNDED) -> torch.nn.Module:
    """A float16 encoder with a float32 layer of this value, and a hooked layer."""
    layers = torch.nn.Sequential(linear(0.1).half(), linear(value))
    if hooked is not None:
        layers[0].forward = hooked.forward  # type: ignore[method-assign]
    return layers


def identity(*given: Any) -> dict[str, Any]:
    return part_identity("text_encoder", encoder(*given))


def test_weights_and_hooked_layers_count_to_their_last_bit() -> None:
    """Nothing is rounded in a part with several dtypes, or in a float32 LoRA on a float16 encoder."""
    plain, changed = identity(), ROUNDED + 1e-6
    assert plain == identity() != identity(None, changed)
    found = [identity(Hooked()), identity(Hooked(changed)), identity(Hooked(extra=1.1)), identity(Hooked(alpha=0.5))]
    assert identity(Hooked()) == found[0]
    assert all(one != other for number, one in enumerate([plain, *found]) for other in found[number:])
    hooked = Hooked()
    part = encoder(hooked)
    assert part_identity("text_encoder", part) == found[0]
    hooked.extra[0].mul_(1.1)  # in place, after its identity was computed
    assert part_identity("text_encoder", part) == found[2]


def test_weights_changed_in_place_count_except_those_of_a_decoder() -> None:
    vae = tiny_part("vae")
    first, pointers = part_identity("vae", vae), [parameter.data_ptr() for parameter in vae.parameters()]
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(1.5)
        assert part_identity("vae", vae) == first
        vae.quant_conv.weight.mul_(1.5)
        assert part_identity("vae", vae) != first
    assert pointers == [parameter.data_ptr() for parameter in vae.parameters()], "nothing is moved"


def test_what_changes_the_values_of_a_module_counts() -> None:
    """Autocast counts, and contexts without an effect do not; so does a class attribute that a release may change."""
    make = pipeline_host.host("own").make

    def encoding(*contexts: Any) -> Any:
        return describe(make("EncodeVAE", autocast_contexts=[nullcontext(), *contexts]), {})

    half = torch.autocast("cpu", torch.bfloat16)
    assert encoding(half) == encoding(half) != encoding(nullcontext())
    assert encoding(torch.autocast("cpu", torch.bfloat16, enabled=False)) == encoding(nullcontext())
    bucketing, found = make("AspectBucketing", quantization=64), []
    for aspects in (((1.0, 1.0),), ((1.0, 1.0), (1.0, 2.0))):
        type(bucketing).all_possible_input_aspects = aspects
        found.append(describe(bucketing, {}))
    assert found[0] != found[1]


def tokenizing(tokenizer: Any, function: Callable[..., Any] | None = None, settings: Any = None) -> Any:
    """mgds' Tokenize, as JSON."""
    more = {"apply_chat_template": function, "apply_chat_template_kwargs": settings}
    return describe(pipeline_host.host("own").make("Tokenize", tokenizer=tokenizer, **more), {})


def tokenizer_with(template: str) -> Any:
    tokenizer = tiny_part("tokenizer")
    tokenizer.chat_template = template
    return tokenizer


SYSTEM = "Describe it."


def _messages(caption: str, role: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": role, "content": caption}]


def with_role(role: str) -> Callable[[str], Any]:
    return lambda caption: _messages(caption, role)


def test_a_chat_template_and_the_function_that_makes_its_messages_count(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ messages[0].content }}"
    tokenizer = tokenizer_with(template)
    settings = {"enable_thinking": True}
    first = tokenizing(tokenizer, with_role("user"), settings)
    assert first == tokenizing(tokenizer_with(template), with_role("user"), settings)
    assert first not in (
        tokenizing(tokenizer, with_role("assistant"), settings),
        tokenizing(tokenizer, lambda caption: _messages(caption, "user"), settings),
        tokenizing(tokenizer, with_role("user"), {"enable_thinking": False}),
        tokenizing(tokenizer_with("{{ messages[1].content }}"), with_role("user"), settings),
    )
    monkeypatch.setitem(globals(), "SYSTEM", "Another one.")
    assert tokenizing(tokenizer, with_role("user"), settings) != first
    assert "chat_template" not in tokenizing(tokenizer)["settings"]


def test_functions_and_values_that_are_reached_through_a_module_count() -> None:
    own, inner = ModuleType("own_util"), ModuleType("own_util.texts")
    own.texts, inner.own = inner, own  # type: ignore[attr-defined]

    def described() -> Any:
        function = eval("lambda text: own.texts.messages(text) + json.dumps(own.ROLE)", {"own": own, "json": json})
        return tokenizing(tiny_part("tokenizer"), function)

    found = []
    for text, role in (("return 'a' + text", "user"), ("return 'b' + text", "user"), ("return 'b' + text", "system")):
        exec(f"def messages(text):\n    {text}", vars(inner))
        own.ROLE = role  # type: ignore[attr-defined]
        found.append(described())
        assert described() == found[-1]
    assert found[0] != found[1] != found[2]


# Loaders of families other than SDXL: the modules before the text cache, as the loaders construct them.
# `onetrainer_families.json` has what each loader's `_preparation_modules` and `_cache_modules` returned, without
# training text encoders, at the commits that it names. {"object": name} stands for something that the trainer loads,
# {"function": name} for a function that builds the messages of a chat template.

RECORDED: dict[str, Any] = json.loads(
    Path(pipeline_host.__file__).with_name("onetrainer_families.json").read_text(encoding="utf-8")
)["families"]


def messages(caption: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": caption}]


def loaded(name: str, parts: dict[str, Any]) -> Any:
    """The trainer's object with this name."""
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


@pytest.mark.extended
@pytest.mark.parametrize("family", sorted(RECORDED))
@pytest.mark.parametrize("host", ["own", "mgds"])
def test_every_module_is_known_and_each_of_its_settings_is_read(host: str, family: str) -> None:
    pipeline, parts = pipeline_host.host(host), tiny_model(family)
    for name, recorded in RECORDED[family]["modules"]:
        assert name in RECOGNISED
        module = pipeline.make(name, **{key: value(each, parts) for key, each in recorded.items()})
        if name != "MapData":  # its values are texts, which count as they are
            assert describe(module, {})["settings"].keys() >= recorded.keys()
