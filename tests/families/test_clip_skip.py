"""A run with `clip_skip`, of the family whose pipeline norms the state that it reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.tiny_models import tiny_encoders, tiny_folder

from latentcache import Config, LatentCache, run_precache


@pytest.mark.parametrize("clip_skip", [0, 1, 2])
def test_an_entry_of_sd15_is_the_normed_state_of_that_layer(make_config: Callable[..., Config], clip_skip: int) -> None:
    options = {
        "model.family": "sd15",
        "model.path": tiny_folder("sd15"),
        "encode.text_store_dtype": "float32",
        "encode.batch_size": 1,
    }
    config = make_config(**options, **{"encode.clip_skip": clip_skip})
    assert run_precache(config).num_refused == 0
    parts = tiny_encoders("sd15")
    encoder, text = parts["text_encoder"], "a validation prompt"
    ids = parts["tokenizer"](text, padding="max_length", max_length=77, return_tensors="pt").input_ids
    layers = getattr(encoder, "text_model", encoder)  # transformers before 5.6 has all of it there
    with torch.no_grad():
        state = encoder(ids, output_hidden_states=True).hidden_states[-(clip_skip + 1)]
        expected = layers.final_layer_norm(state)
    with LatentCache(config.cache.path) as cache:
        assert torch.equal(cache.prompt(text, device="cpu")["prompt_embeds"], expected)
