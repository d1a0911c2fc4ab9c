"""Tokens that were added to a tokenizer, as a textual inversion adds them: CLIP's pooled output is that of the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.tiny_models import tiny_encoders, tiny_folder

from latentcache import Config, LatentCache, LoadedModels, run_precache
from latentcache.families import family_named

PLAIN, LEARNED = "a validation prompt", "a <my-style> prompt"
POOLED = {"sdxl": "text_encoder_2", "flux": "text_encoder"}
"""The encoder whose pooled output is in an entry."""
SETTINGS = {"encode.text_store_dtype": "float32", "encode.batch_size": 1, "validation.prompts": [PLAIN, LEARNED]}


def parts_of(family: str, *, eos_token_id: int | None = 2) -> dict[str, Any]:
    """A tiny model whose tokenizers have a learned token. Published models have 2 as the end of a text."""
    parts = tiny_encoders(family)
    encoder = parts[POOLED[family]]
    tokenizer = parts[POOLED[family].replace("text_encoder", "tokenizer")]
    assert tokenizer.add_tokens(["<my-style>"]) == 1
    torch.manual_seed(0)
    encoder.resize_token_embeddings(len(tokenizer))
    encoder.requires_grad_(False)
    if eos_token_id is not None:
        encoder.config.eos_token_id = eos_token_id
        for module in encoder.modules():
            if hasattr(module, "eos_token_id"):
                module.eos_token_id = eos_token_id
    return parts


@pytest.fixture
def filled(make_config: Callable[..., Config]) -> Callable[..., dict[str, Any]]:
    """Runs with these parts: each prompt's entry, and how it was encoded."""

    def filled(family: str, parts: dict[str, Any]) -> dict[str, Any]:
        config = make_config(**SETTINGS, **{"model.path": tiny_folder(family)})
        report = run_precache(config, models=LoadedModels(family=family_named(family), **parts))
        assert report.num_refused == 0
        with LatentCache(config.cache.path) as cache:
            entries = {text: cache.prompt(text, device="cpu") for text in (PLAIN, LEARNED)}
            return {**entries, "recipe": cache.manifest("photos").common["text_encoding"]}

    return filled


@pytest.mark.parametrize("family", POOLED)
def test_a_learned_token_is_not_taken_for_the_end(family: str, filled: Callable[..., dict[str, Any]]) -> None:
    """transformers takes the largest id for the end where the config says 2, and learned tokens have larger ones."""
    found = filled(family, parts_of(family))
    right = filled(family, parts_of(family, eos_token_id=None))  # the tokenizer's own: transformers looks for it
    for text in (PLAIN, LEARNED):
        assert torch.equal(found[text]["prompt_embeds"], right[text]["prompt_embeds"])
        assert torch.equal(found[text]["pooled_prompt_embeds"], right[text]["pooled_prompt_embeds"]), text
    assert found["recipe"]["pooled_at"] == "first eos" and "pooled_at" not in right["recipe"]


def test_the_callers_encoder_is_left_as_it_was(filled: Callable[..., dict[str, Any]]) -> None:
    parts = parts_of("sdxl")
    filled("sdxl", parts)
    modules = [each for each in parts["text_encoder_2"].modules() if hasattr(each, "eos_token_id")]
    assert modules and all(each.eos_token_id == 2 for each in modules)
