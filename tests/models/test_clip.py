from __future__ import annotations

import pytest
import torch
from helpers.encoding import encode_captions
from helpers.tiny_models import tiny_pipeline

from latentcache.errors import ModelError
from latentcache.families.sdxl import FAMILY as SDXL
from latentcache.models.model_loader import LoadedModels, ModelLoader
from latentcache.models.tiny import tiny_parts

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


@pytest.mark.parametrize("clip_skip", [-1, 2])
def test_a_clip_skip_beyond_the_layers_names_the_allowed_range(text, clip_skip):
    with pytest.raises(ModelError, match=rf"clip_skip is {clip_skip}, but these text encoders allow 0 to 1"):
        encode_captions(text, ["a cat"], clip_skip=clip_skip)


def test_tokens_know_how_long_the_captions_were(text):
    captions = ["", "ab", LONG, "x" * 75, "x" * 74, "x" * 76]
    tokens = SDXL.tokenize(text, captions)
    uncut = [
        [len(ids) for ids in tokenizer(captions, truncation=False, padding=False).input_ids]
        for tokenizer in (text["tokenizer"], text["tokenizer_2"])
    ]
    assert [each.num_tokens for each in tokens] == [max(pair) for pair in zip(*uncut, strict=True)]
    assert {ids.shape for each in tokens for ids in each.input_ids} == {(1, 77)}


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
