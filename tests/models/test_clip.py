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
