"""Qwen-Image: its template, its mask, and latents with one frame that Krea 2 shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from diffusers import QwenImagePipeline
from helpers.tiny_models import byte_symbols, tiny_model

from latentcache.errors import ConfigError, ModelError
from latentcache.families import family_named
from latentcache.families.qwen_image import NUM_DROPPED

QWEN, KREA = family_named("qwen-image"), family_named("krea2")


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return tiny_model(QWEN.name)


def encoded(parts: dict[str, Any], texts: list[str], **settings: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return QWEN.encode_text(parts, QWEN.tokenize(parts, texts), QWEN.text_recipe(**settings))


def test_the_rows_that_are_dropped_are_those_of_the_system_prompt(parts: dict[str, Any]) -> None:
    prefix = QWEN.rendered(parts, "a text").partition("a text")[0]
    assert len(parts["tokenizer"](prefix).input_ids) == NUM_DROPPED
    assert QwenImagePipeline(*[None] * 5).prompt_template_encode_start_idx == NUM_DROPPED
    # The rows of the text and of what follows it: nothing of the prompt before.
    rendered = QWEN.rendered(parts, "cat").removeprefix(prefix)
    assert encoded(parts, ["cat"])["prompt_embeds"].shape[1] == len(parts["tokenizer"](rendered).input_ids)


@pytest.mark.parametrize("family", [QWEN, KREA], ids=lambda family: family.name)
def test_a_tokenizer_that_cuts_the_system_prompt_otherwise_is_refused(family: Any, parts: dict[str, Any]) -> None:
    vocab = {symbol: index for index, symbol in enumerate(byte_symbols())}
    other = transformers.Qwen2Tokenizer(vocab=vocab, merges=[])
    tokens = family.tokenize(parts, ["cat"])
    with pytest.raises(ModelError, match=f"into \\d+ tokens, but the pipeline drops {NUM_DROPPED}"):
        family.encode_text({**parts, "tokenizer": other}, tokens, family.text_recipe())


def test_long_texts_are_cut_as_the_pipeline_cuts_them(parts: dict[str, Any]) -> None:
    recipe = QWEN.text_recipe(max_length=12)
    tokens = QWEN.tokenize(parts, ["a red cat on the table"])
    assert tokens[0].num_tokens > QWEN.token_limit(parts, recipe)
    with torch.no_grad():
        made = QWEN.encode_text(parts, tokens, recipe)
        live, _ = QWEN.pipeline(**parts).encode_prompt(["a red cat on the table"], max_sequence_length=12)
    assert torch.equal(made["prompt_embeds"], live) and made["prompt_embeds"].shape[1] == 12
    with pytest.raises(ConfigError, match="takes 1024 tokens"):
        QWEN.text_recipe(max_length=1025)


@pytest.mark.parametrize("family", [QWEN, KREA, family_named("z-image")], ids=lambda family: family.name)
def test_padding_that_the_denoiser_masks_is_not_kept(family: Any) -> None:
    with pytest.raises(ConfigError, match="does not read padding"):
        family.text_recipe(padding="keep")
    assert not family.text_recipe(padding="drop")["keeps_padding"]
