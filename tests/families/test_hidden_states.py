"""Which hidden states of an LLM are stored, and which weights they depend on: what a new transformers could change."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.tiny_models import tiny_encoders

from latentcache.errors import ModelError
from latentcache.families import family_named
from latentcache.families.hidden_states import HiddenStates

FAMILIES = (
    *("qwen-image", "qwen-image-edit", "krea2", "flux2", "flux2-dev", "qwen-image-21", "qwen-image-21-edit"),
    "ideogram4",
)
"""Those with an LLM, of which some weights are not used."""
PICTURE = np.random.default_rng(0).integers(0, 256, (64, 32, 3), dtype=np.uint8)


@functools.cache
def tiny(name: str) -> dict[str, Any]:
    return tiny_encoders(name)


def encoded(name: str, **changed: Any) -> torch.Tensor:
    family, parts, text = family_named(name), {**tiny(name), **changed}, "a red cat"
    if family.text_reads_control:
        recipe, tokens = family.text_recipe(), family.tokenize_with_control(parts, [text], [[PICTURE]])
    else:
        length = 24 if "max_length" in family.text_recipe() else None
        recipe, tokens = family.text_recipe(max_length=length), family.tokenize(parts, [text])
    with torch.no_grad():
        return family.encode_text(parts, tokens, recipe)["prompt_embeds"][0]


@pytest.mark.extended
@pytest.mark.parametrize("name", FAMILIES)
def test_those_weights_are_digested_that_change_the_result(name: str) -> None:
    """Each layer of them does, and the others do not."""
    prefixes = family_named(name).parts["text_encoder"].weights
    used: dict[str, list[str]] = {}
    unused: list[str] = []
    seen: set[int] = set()
    for key, tensor in tiny(name)["text_encoder"].state_dict().items():
        if key.startswith(prefixes):
            used.setdefault(key.rpartition("layers.")[2].partition(".")[0], []).append(key)
            seen.add(tensor.data_ptr())
        elif tensor.data_ptr() not in seen:  # else a tied one
            unused.append(key)
    assert used and unused

    def with_weights(keys: list[str], factor: float) -> torch.Tensor:
        encoder = copy.deepcopy(tiny(name)["text_encoder"])
        for key in keys:
            encoder.state_dict()[key].mul_(factor)
        return encoded(name, text_encoder=encoder)

    before = encoded(name)
    assert torch.equal(with_weights(unused, 7.0), before)
    for layer, keys in used.items():
        assert not torch.equal(with_weights(keys, 1.5), before), layer


def test_an_encoder_within_a_model_with_a_head_gives_the_same() -> None:
    own = tiny("z-image")["text_encoder"]
    model = transformers.Qwen3ForCausalLM(own.config).eval().requires_grad_(False)
    model.model.load_state_dict(own.state_dict())
    assert torch.equal(encoded("z-image", text_encoder=model), encoded("z-image"))


def test_a_compiled_encoder_is_run_as_it_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks that are added to a compiled module are not run."""
    encoder, expected = tiny("z-image")["text_encoder"], encoded("z-image")
    monkeypatch.setattr(encoder, "_compiled_call_impl", lambda *_, **__: pytest.fail("the compiled one was called"))
    assert torch.equal(encoded("z-image"), expected)


def test_modules_that_are_not_there_or_not_run_are_errors() -> None:
    encoder = tiny("z-image")["text_encoder"]
    for end, number in (("layers.7", 0), ("mlp", 4), ("ayers.0", 0)):
        with pytest.raises(ModelError, match=f"^text_encoder: {number} modules of Qwen3Model have names that end in"):
            HiddenStates(encoder, {1: end})
    encoder = tiny("krea2")["text_encoder"]
    states = HiddenStates(encoder, {1: "language_model.layers.0", 2: "visual.merger"})
    with torch.no_grad(), pytest.raises(ModelError, match="did not run 1 of the modules"):
        states(input_ids=torch.ones(1, 3, dtype=torch.int64))
    assert not any(each._forward_hooks for each in encoder.modules()), "no hook is left"
