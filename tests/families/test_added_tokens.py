"""Tokens that were added to a tokenizer, as a textual inversion adds them: CLIP's pooled output is that of the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.tiny_models import tiny_encoders, tiny_folder

from latentcache import Config, LatentCache, LoadedModels, run_precache
from latentcache.families import family_named
from latentcache.models.tiny import seeded

TEXTS = ["a validation prompt", "a <my-style> prompt"]
POOLED = {"sdxl": "text_encoder_2", "flux": "text_encoder"}
"""The encoder whose pooled output is in an entry."""


@pytest.mark.parametrize("family", POOLED)
def test_a_learned_token_is_not_taken_for_the_end(family: str, make_config: Callable[..., Config]) -> None:
    """transformers takes the largest id for the end where the config says 2, and learned tokens have larger ones.

    Published models have 2 there. Where it is the tokenizer's own end transformers looks for it.
    """
    options: dict[str, Any] = {"encode.text_store_dtype": "float32", "encode.batch_size": 1}
    config = make_config(**options, **{"validation.prompts": TEXTS, "model.path": tiny_folder(family)})
    found, recipes = [], []
    for eos_token_id in (2, None):
        parts = tiny_encoders(family)
        encoder = parts[POOLED[family]]
        tokenizer = parts[POOLED[family].replace("text_encoder", "tokenizer")]
        assert tokenizer.add_tokens(["<my-style>"]) == 1
        with seeded(0):
            encoder.resize_token_embeddings(len(tokenizer))
        encoder.requires_grad_(False)
        read = [module for module in encoder.modules() if hasattr(module, "eos_token_id")]
        for each in (encoder.config, *read) if eos_token_id is not None else ():
            each.eos_token_id = eos_token_id
        before = [module.eos_token_id for module in read]
        report = run_precache(config, models=LoadedModels(family=family_named(family), **parts))
        assert report.num_refused == 0
        assert before == [module.eos_token_id for module in read] != [], "the caller's encoder is left as it was"
        with LatentCache(config.cache.path) as cache:
            found.append([cache.prompt(text, device="cpu") for text in TEXTS])
            recipes.append(cache.manifest("photos").common["text_encoding"])
    for own, right in zip(*found, strict=True):
        assert all(torch.equal(own[name], right[name]) for name in ("prompt_embeds", "pooled_prompt_embeds"))
    assert recipes[0]["pooled_at"] == "first eos" and "pooled_at" not in recipes[1]
