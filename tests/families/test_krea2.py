"""Krea 2: the suffix after the padding, one length for both prompts, and guidance that is off at 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.tiny_models import tiny_model

from latentcache.families import family_named
from latentcache.families.packed import packed
from latentcache.types import Padding

KREA = family_named("krea2")
TEXTS = ["cat", "a red cat on the table"]
SHORT = KREA.text_recipe(max_length=48)


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return tiny_model(KREA.name)


def encoded(parts: dict[str, Any], texts: list[str]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return KREA.encode_text(parts, KREA.tokenize(parts, texts), SHORT)


def test_what_is_stored_are_the_texts_and_the_suffix(parts: dict[str, Any]) -> None:
    made = encoded(parts, TEXTS)
    with torch.no_grad():
        live, mask = KREA.pipeline(
            **parts, text_encoder_select_layers=tuple(map(int, SHORT["layers"].split()))
        ).encode_prompt(TEXTS, max_sequence_length=48)
    assert torch.equal(made["prompt_embeds"], live) and torch.equal(made["prompt_embeds_mask"], mask)
    assert made["prompt_embeds"].shape == (2, 48, 12, 16)
    assert KREA.text_shapes(parts, SHORT) == {"prompt_embeds": (48, 12, 16)}
    first = made["prompt_embeds_mask"][0].int().tolist()
    assert first == [1] * 3 + [0] * 40 + [1] * 5
    prefix, suffix = KREA.rendered({}, "cat").split("cat")
    ids = [parts["tokenizer"](text).input_ids for text in (prefix, suffix)]
    assert [len(each) for each in ids] == [SHORT["num_dropped"], KREA.padding("prompt_embeds", SHORT).num_last]


def padded_again(made: dict[str, torch.Tensor], rule: Padding) -> dict[str, torch.Tensor]:
    """What a batch has of the rows that are stored."""
    assert rule.length is not None
    embeds = made["prompt_embeds"].new_zeros(len(made["prompt_embeds"]), rule.length, *made["prompt_embeds"].shape[2:])
    mask = torch.zeros(embeds.shape[:2], dtype=torch.bool)
    for row, kept, all_rows, valid in zip(embeds, mask, made["prompt_embeds"], made["prompt_embeds_mask"], strict=True):
        stored = all_rows[valid]
        num_first = len(stored) - rule.num_last
        row[:num_first], row[-rule.num_last :] = stored[:num_first], stored[num_first:]
        kept[:num_first] = kept[-rule.num_last :] = True
    return {"prompt_embeds": embeds, "prompt_embeds_mask": mask}


def test_zeros_before_the_suffix_lose_nothing(parts: dict[str, Any]) -> None:
    made, rule = encoded(parts, TEXTS), KREA.padding("prompt_embeds", SHORT)
    assert rule == Padding(48, num_last=5)
    noisy = torch.randn(2, 16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    timesteps = torch.tensor([700.0, 300.0])
    again = padded_again(made, rule)
    assert torch.equal(again["prompt_embeds_mask"], made["prompt_embeds_mask"])
    with torch.no_grad():
        wanted = KREA.predict(parts["transformer"], noisy, timesteps, made)
        assert torch.equal(KREA.predict(parts["transformer"], noisy, timesteps, again), wanted)


def test_positive_and_negative_prompts_have_one_length(parts: dict[str, Any]) -> None:
    rule = KREA.padding("prompt_embeds", SHORT)
    positive, negative = (padded_again(encoded(parts, [text]), rule) for text in (TEXTS[1], ""))
    pipeline = KREA.pipeline(transformer=parts["transformer"], scheduler=parts["scheduler"])
    noise = packed(torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0)))
    options = {"height": 64, "width": 64, "num_inference_steps": 1, "output_type": "latent", "return_dict": False}
    images = [
        pipeline(
            **KREA.pipeline_kwargs(positive, negative if KREA.uses_negative(guidance) else None),
            **KREA.guidance_kwargs(guidance),
            **options,
            latents=noise,
        )[0]
        for guidance in (0.0, 1.0)
    ]
    assert not torch.equal(*images)
    assert KREA.uses_negative(0.5) and not KREA.uses_negative(0.0)
    # Of unequal lengths the pipeline takes none: it makes the positions for one of them.
    cut = {name: tensor[:, 3:] for name, tensor in negative.items()}
    with pytest.raises(RuntimeError, match="must match the size"):
        pipeline(**KREA.pipeline_kwargs(positive, cut), guidance_scale=1.0, **options, latents=noise)
