"""Qwen-Image: its template, its mask, and latents with one frame that Krea 2 shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from diffusers import QwenImagePipeline
from helpers.tiny_models import byte_symbols, tiny_model

from latentcache.errors import ConfigError, ModelError
from latentcache.families import family_named
from latentcache.families.qwen_image import NUM_DROPPED
from latentcache.models.part_identity import module_identity
from latentcache.models.vae import encode_images

QWEN, KREA = family_named("qwen-image"), family_named("krea2")
TEXTS = ["cat", "a {red} cat, {} and {0}"]


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return tiny_model(QWEN.name)


def encoded(parts: dict[str, Any], texts: list[str], **settings: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return QWEN.encode_text(parts, QWEN.tokenize(parts, texts), QWEN.text_recipe(**settings))


def test_the_key_is_made_of_the_text_in_the_pipelines_template(parts: dict[str, Any]) -> None:
    seen: list[str] = []

    class Recorder:
        def __call__(self, texts: list[str], **options: Any) -> Any:
            seen.extend(texts)
            return parts["tokenizer"](texts, **options)

    pipeline = QWEN.pipeline(text_encoder=parts["text_encoder"], tokenizer=Recorder())
    with torch.no_grad():
        pipeline.encode_prompt(TEXTS, device="cpu")
    assert seen == [QWEN.rendered({}, text) for text in TEXTS]
    assert "a {red} cat, {} and {0}" in seen[1]


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


def test_texts_of_unequal_length_have_a_mask_and_those_of_equal_length_none(parts: dict[str, Any]) -> None:
    made = encoded(parts, TEXTS)
    with torch.no_grad():
        live, mask = QWEN.pipeline(**parts).encode_prompt(TEXTS, max_sequence_length=512)
    assert torch.equal(made["prompt_embeds"], live) and torch.equal(made["prompt_embeds_mask"], mask.bool())
    assert made["prompt_embeds_mask"].sum(1).tolist() == [8, made["prompt_embeds"].shape[1]]
    equal = encoded(parts, ["cat", "dog"])
    assert equal["prompt_embeds_mask"].all()
    kwargs = QWEN.pipeline_kwargs(equal, made)
    assert kwargs["prompt_embeds_mask"] is None and kwargs["negative_prompt_embeds_mask"] is made["prompt_embeds_mask"]
    noisy = torch.zeros(2, 16, 6, 8)
    conditions = QWEN.conditions(parts["transformer"], noisy, equal)
    assert conditions["encoder_hidden_states_mask"] is None and conditions["img_shapes"] == [[(1, 3, 4)]] * 2
    assert QWEN.conditions(parts["transformer"], noisy, made)["encoder_hidden_states_mask"] is not None


def test_the_denoiser_reads_no_padding(parts: dict[str, Any]) -> None:
    made, timesteps = encoded(parts, TEXTS), torch.tensor([700.0, 300.0])
    noisy = torch.randn(2, 16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    spoiled = torch.where(made["prompt_embeds_mask"][..., None], made["prompt_embeds"], torch.tensor(7.0))
    with torch.no_grad():
        wanted = QWEN.predict(parts["transformer"], noisy, timesteps, made)
        found = QWEN.predict(parts["transformer"], noisy, timesteps, {**made, "prompt_embeds": spoiled})
        without = QWEN.predict(parts["transformer"], noisy, timesteps, {"prompt_embeds": made["prompt_embeds"]})
    assert torch.equal(found, wanted) and wanted.shape == noisy.shape
    assert (without - wanted).abs().max() > 1e-3  # the mask counts


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


def test_guidance_is_classifier_free() -> None:
    assert QWEN.guidance_kwargs(4.0) == {"true_cfg_scale": 4.0}
    assert QWEN.uses_negative(1.5) and not QWEN.uses_negative(1.0)


def test_images_have_one_frame_and_one_identity_with_krea2(parts: dict[str, Any]) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (2, 32, 48, 3), dtype=np.uint8)
    moments = encode_images(parts["vae"], pixels, QWEN)
    frames = torch.from_numpy(pixels).movedim(-1, 1).float().div(127.5).sub(1.0)[:, :, None].contiguous()
    with torch.no_grad():
        assert torch.equal(moments, parts["vae"].encode(frames).latent_dist.parameters)
    assert moments.shape == (2, 32, 1, 4, 6)
    assert torch.equal(encode_images(tiny_model(KREA.name)["vae"], pixels, KREA), moments)
    identities = {
        module_identity("vae", model["vae"], torch.float32, family.parts["vae"].weights, family.parts["vae"].settings)
        for family, model in ((QWEN, parts), (KREA, tiny_model(KREA.name)))
    }
    assert len(identities) == 1
