"""Which hidden states of an LLM are stored, and which weights they depend on: what a new transformers could change."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.tiny_models import tiny_model

from latentcache.families import family_named
from latentcache.families.base import Family

LAYERS = {
    "qwen-image": "model.language_model",
    "qwen-image-edit": "model.language_model",
    "krea2": "language_model",
    "flux2": "model",
    "flux2-dev": "model.language_model",
}
"""Where the LLM lies in the text encoder of each family."""
PICTURE = np.random.default_rng(0).integers(0, 256, (64, 32, 3), dtype=np.uint8)


@functools.cache
def tiny(name: str) -> dict[str, Any]:
    return tiny_model(name)


def encoded(family: Family, text: str = "a red cat", num_rows: int = 24) -> torch.Tensor:
    parts = tiny(family.name)
    if family.text_reads_control:
        recipe, tokens = family.text_recipe(), family.tokenize_with_control(parts, [text], [[PICTURE]])
    else:
        recipe, tokens = family.text_recipe(max_length=num_rows), family.tokenize(parts, [text])
    with torch.no_grad():
        return family.encode_text(parts, tokens, recipe)["prompt_embeds"][0]


@pytest.mark.parametrize("name", LAYERS)
def test_a_state_is_the_output_of_the_layer_before_it_and_the_last_one_is_normed(name: str) -> None:
    family, outputs = family_named(name), {}
    model = tiny(name)["text_encoder"].get_submodule(LAYERS[name])

    def keep(number: int):
        return lambda module, args, out: outputs.update({number: (out[0] if isinstance(out, tuple) else out).clone()})

    hooks = [layer.register_forward_hook(keep(number)) for number, layer in enumerate(model.layers, 1)]
    hooks.append(model.norm.register_forward_hook(keep(-1)))
    try:
        found = encoded(family)
    finally:
        for hook in hooks:
            hook.remove()
    states = [outputs[layer] for layer in map(int, family.text_recipe()["layers"].split())]
    wanted = torch.stack(states, dim=2) if name == "krea2" else torch.cat(states, dim=2)
    dropped = family.text_recipe().get("num_dropped", 0)
    assert torch.equal(found, wanted[0, dropped:])


def weights_by_use(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters of the text encoder that are digested, and the others."""
    prefixes = family_named(name).parts["text_encoder"].weights
    used: list[torch.Tensor] = []
    unused: list[torch.Tensor] = []
    seen: set[int] = set()
    for key, parameter in tiny(name)["text_encoder"].state_dict(keep_vars=True).items():
        if key.startswith(prefixes):
            used.append(parameter)
            seen.add(parameter.data_ptr())
        elif parameter.data_ptr() not in seen:  # else a tied one
            unused.append(parameter)
    return used, unused


@pytest.mark.parametrize("name", LAYERS)
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
@pytest.mark.parametrize("name", LAYERS)
def test_each_weight_that_is_digested_changes_the_result(name: str) -> None:
    family, (used, _) = family_named(name), weights_by_use(name)
    before = encoded(family)
    for parameter in used:
        kept = parameter.data.clone()
        parameter.data.mul_(1.5)
        changed = encoded(family)
        parameter.data.copy_(kept)
        assert not torch.equal(changed, before)
    assert torch.equal(encoded(family), before)


def test_an_encoder_within_a_model_with_a_head_gives_the_same() -> None:
    family, parts = family_named("z-image"), tiny("z-image")
    model = transformers.Qwen3ForCausalLM(parts["text_encoder"].config).eval().requires_grad_(False)
    model.model.load_state_dict(parts["text_encoder"].state_dict())
    texts, recipe = family.tokenize(parts, ["a red cat"]), family.text_recipe(max_length=24)
    with torch.no_grad():
        found = family.encode_text({**parts, "text_encoder": model}, texts, recipe)["prompt_embeds"][0]
    assert torch.equal(found, encoded(family))
