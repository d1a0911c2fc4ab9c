"""Which hidden states of an LLM are stored, and which weights they depend on: what a new transformers could change."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.tiny_models import tiny_model

from latentcache.errors import ModelError
from latentcache.families import family_named
from latentcache.families.base import Family
from latentcache.families.hidden_states import HiddenStates

FAMILIES = (
    *("qwen-image", "qwen-image-edit", "krea2", "flux2", "flux2-dev", "qwen-image-21", "qwen-image-21-edit"),
    "ideogram4",
)
"""Those with an LLM, of which some weights are not used."""
PICTURE = np.random.default_rng(0).integers(0, 256, (64, 32, 3), dtype=np.uint8)


@functools.cache
def tiny(name: str) -> dict[str, Any]:
    return tiny_model(name)


def encoded(family: Family, text: str = "a red cat", num_rows: int = 24) -> torch.Tensor:
    return entry(family, text, num_rows)["prompt_embeds"][0]


def entry(family: Family, text: str, num_rows: int) -> dict[str, torch.Tensor]:
    parts = tiny(family.name)
    if family.text_reads_control:
        recipe, tokens = family.text_recipe(), family.tokenize_with_control(parts, [text], [[PICTURE]])
    else:
        length = num_rows if "max_length" in family.text_recipe() else None
        recipe, tokens = family.text_recipe(max_length=length), family.tokenize(parts, [text])
    with torch.no_grad():
        return family.encode_text(parts, tokens, recipe)


def weights_by_use(name: str) -> tuple[dict[str, list[torch.Tensor]], list[torch.Tensor]]:
    """Parameters of the text encoder that are digested, by their layer, and the others."""
    prefixes = family_named(name).parts["text_encoder"].weights
    used: dict[str, list[torch.Tensor]] = {}
    unused: list[torch.Tensor] = []
    seen: set[int] = set()
    for key, parameter in tiny(name)["text_encoder"].state_dict(keep_vars=True).items():
        if key.startswith(prefixes):
            used.setdefault(key.rpartition("layers.")[2].partition(".")[0], []).append(parameter)
            seen.add(parameter.data_ptr())
        elif parameter.data_ptr() not in seen:  # else a tied one
            unused.append(parameter)
    return used, unused


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_that_are_not_digested_change_nothing(name: str) -> None:
    family, (_, unused) = family_named(name), weights_by_use(name)
    before, kept = encoded(family), [parameter.data.clone() for parameter in unused]
    assert unused
    try:
        for parameter in unused:
            parameter.data.fill_(7.0)
        assert torch.equal(encoded(family), before)
    finally:
        for parameter, data in zip(unused, kept, strict=True):
            parameter.data.copy_(data)


@pytest.mark.families
@pytest.mark.parametrize("name", FAMILIES)
def test_each_layer_that_is_digested_changes_the_result(name: str) -> None:
    family, (used, _) = family_named(name), weights_by_use(name)
    before = encoded(family)
    for layer, parameters in used.items():
        kept = [parameter.data.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.data.mul_(1.5)
        changed = encoded(family)
        for parameter, data in zip(parameters, kept, strict=True):
            parameter.data.copy_(data)
        assert not torch.equal(changed, before), layer
    assert torch.equal(encoded(family), before)


def hooks_of(module: torch.nn.Module) -> list[int]:
    """transformers leaves its own at an encoder, where it was asked for hidden states."""
    return [len(each._forward_hooks) for each in module.modules()]


def test_an_encoder_within_a_model_with_a_head_gives_the_same() -> None:
    family, parts = family_named("z-image"), tiny("z-image")
    model = transformers.Qwen3ForCausalLM(parts["text_encoder"].config).eval().requires_grad_(False)
    model.model.load_state_dict(parts["text_encoder"].state_dict())
    texts, recipe = family.tokenize(parts, ["a red cat"]), family.text_recipe(max_length=24)
    with torch.no_grad():
        found = family.encode_text({**parts, "text_encoder": model}, texts, recipe)["prompt_embeds"][0]
    assert torch.equal(found, encoded(family))


def test_a_compiled_encoder_is_run_as_it_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks that are added to a compiled module are not run."""
    encoder, expected = tiny("z-image")["text_encoder"], encoded(family_named("z-image"))
    monkeypatch.setattr(encoder, "_compiled_call_impl", lambda *_, **__: pytest.fail("the compiled one was called"))
    assert torch.equal(encoded(family_named("z-image")), expected)


def test_a_name_of_no_module_or_of_several_is_refused() -> None:
    encoder = tiny("z-image")["text_encoder"]
    for end, number in (("layers.7", 0), ("mlp", 4), ("ayers.0", 0)):
        with pytest.raises(ModelError, match=f"^text_encoder: {number} modules of Qwen3Model have names that end in"):
            HiddenStates(encoder, {1: end})


def test_a_module_that_is_not_run_is_an_error() -> None:
    encoder = tiny("krea2")["text_encoder"]
    before, states = hooks_of(encoder), HiddenStates(encoder, {1: "language_model.layers.0", 2: "visual.merger"})
    with torch.no_grad(), pytest.raises(ModelError, match="ran without 1 of the modules whose outputs are read"):
        states(input_ids=torch.ones(1, 3, dtype=torch.int64))
    assert hooks_of(encoder) == before
