from __future__ import annotations

import pytest
import torch
from helpers.tiny_models import encode_captions, tiny_encoders, tiny_folder, tiny_pipeline

from latentcache import LatentCache, run_precache
from latentcache.errors import ModelError
from latentcache.families import family_named
from latentcache.families.sdxl import FAMILY as SDXL
from latentcache.models.model_loader import LoadedModels, ModelLoader
from latentcache.models.tiny import seeded, tiny_parts

LONG = "a very long caption " * 20
CAPTIONS = ["a photo of a cat", "", "日本の猫 🙂 café", LONG, "  Mixed CASE,  punctuation!? "]


@pytest.fixture(scope="module")
def text():
    return ModelLoader("tiny").text(torch.float32)


@pytest.mark.parametrize("clip_skip", [0, 1])
def test_embeddings_are_bit_equal_to_the_pipelines(text, parts, clip_skip):
    pipeline = tiny_pipeline(parts)
    for captions in (*([caption] for caption in CAPTIONS), CAPTIONS):
        with torch.autocast("cpu", dtype=torch.bfloat16):  # a surrounding one does not count
            ours = encode_captions(text, captions, clip_skip=clip_skip)
        with torch.no_grad():
            expected = pipeline.encode_prompt(captions, device="cpu", clip_skip=clip_skip or None)
        assert torch.equal(ours["prompt_embeds"], expected[0])
        assert torch.equal(ours["pooled_prompt_embeds"], expected[2])
        assert ours["prompt_embeds"].shape == (len(captions), 77, 72)
        assert ours["pooled_prompt_embeds"].shape == (len(captions), 40)
        assert not ours["prompt_embeds"].requires_grad


def test_a_clip_skip_beyond_the_layers_is_refused(text):
    with pytest.raises(ModelError, match="clip_skip is 2, but these text encoders allow 0 to 1"):
        encode_captions(text, ["a cat"], clip_skip=2)


def test_a_textual_inversion_of_several_vectors_is_written_out_as_the_pipeline_does():
    parts = tiny_parts()
    for name, tokenizer in (("text_encoder", "tokenizer"), ("text_encoder_2", "tokenizer_2")):
        parts[tokenizer].add_tokens(["<toy>", "<toy>_1", "<toy>_2"])
        parts[name].resize_token_embeddings(len(parts[tokenizer]), mean_resizing=False)
        parts[name].requires_grad_(False)
    text = LoadedModels(**parts).text(torch.float32)
    captions = ["a photo of <toy> on a table", "nothing"]
    with torch.no_grad():
        expected = tiny_pipeline(parts).encode_prompt(captions, device="cpu")
    ours = encode_captions(text, captions)
    assert torch.equal(ours["prompt_embeds"], expected[0]) and torch.equal(ours["pooled_prompt_embeds"], expected[2])
    plain = SDXL.tokenize(text, ["a photo of  on a table"])[0]
    assert SDXL.tokenize(text, captions)[0].num_tokens == plain.num_tokens + 3


TEXTS = ["a validation prompt", "a <my-style> prompt"]
POOLED = {"sdxl": "text_encoder_2", "flux": "text_encoder"}
"""The encoder whose pooled output is in an entry."""


@pytest.mark.parametrize("family", POOLED)
def test_a_learned_token_is_not_taken_for_the_end(family, make_config):
    """transformers takes the largest id for the end where the config says 2, and learned tokens have larger ones.

    Published models have 2 there. Where it is the tokenizer's own end transformers looks for it.
    """
    options = {"encode.text_store_dtype": "float32", "encode.batch_size": 1}
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
