"""Prompts of more than 77 tokens: the rows and the pooled output that sd-scripts makes of them.

The reference here was compared bit by bit with the strategies of sd-scripts 48d368f on encoders like these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_models import tiny_encoders, tiny_folder, tiny_model

from latentcache import (
    Config,
    LatentCache,
    ValidationRunner,
    run_precache,
)
from latentcache.families import family_named

SDXL, SD15 = family_named("sdxl"), family_named("sd15")
NUM_TOKENS = (0, 1, 73, 74, 75, 76, 77, 148, 149, 150, 151, 152, 223, 224, 225, 226, 227, 300)
GLUED = "!!!!!?"
"""Of five tokens with the id 0, which is the padding of SDXL's second tokenizer, and one other."""


def words(number: int) -> str:
    """A text of so many tokens."""
    return " ".join("abcdefghijklmnopqrstuvwxyz"[at % 26] for at in range(number))


# The padding's token is first and last in a chunk: sd-scripts puts the end in its place, or leaves the chunk without.
EDGES = [f"{words(number)} {GLUED}{words(more)}" for number in (0, 69, 70, 72, 74, 144, 148, 149) for more in (0, 90)]
MIXED = [
    *("", "a photo of a cat", "日本の猫 🙂 café", "Mixed CASE,  punctuation!? " * 9, "a very long caption " * 20),
    *map(words, NUM_TOKENS),
    *EDGES,
]


# The reference


def chunked_ids(tokenizer: Any, text: str, chunks: int) -> torch.Tensor:
    """int64 [chunks, 77] for chunks > 1: the caption's ids in chunks of 75, each with begin and end."""
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    body = tokenizer(text, truncation=False, verbose=False, add_special_tokens=False).input_ids[: 75 * chunks]
    flat = torch.full((75 * chunks + 1,), pad)
    flat[: len(body)] = torch.tensor(body, dtype=torch.int64)
    flat[len(body)] = eos
    rows = flat[:-1].view(chunks, 75)
    ends = torch.full((chunks, 1), int(flat[-1]))
    if pad != eos:  # each row is repaired by what is seen in it: a caption's own token `pad` counts as padding
        ends[(rows[:, -1:] != eos) & (rows[:, -1:] != pad)] = eos
        rows[rows[:, 0] == pad, 0] = eos
    return torch.cat([torch.full((chunks, 1), bos), rows, ends], dim=1)


def joined(states: torch.Tensor, chunks: int) -> torch.Tensor:
    """[B * chunks, 77, D] -> [B, 75 * chunks + 2, D]."""
    states = states.unflatten(0, (-1, chunks))
    return torch.cat([states[:, 0, :1], states[:, :, 1:-1].flatten(1, 2), states[:, -1, -1:]], dim=1)


def reference(
    family: Any, parts: dict[str, Any], texts: Sequence[str], chunks: int, clip_skip: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and pooled outputs.

    SDXL reads of both encoders the last state but one, and encoder 2's output at its first end. SD 1.5 reads the last
    state, or one before it, with the last norm, and no pooled output: here zeros.
    """
    states, pooled = [], torch.zeros(len(texts))
    with torch.no_grad():
        for names in zip(family.names("tokenizer"), family.names("text_encoder"), strict=True):
            tokenizer, encoder = (parts[name] for name in names)
            ids = torch.cat([chunked_ids(tokenizer, text, chunks) for text in texts])
            output = encoder(ids, output_hidden_states=True)
            if family is SDXL:
                states.append(output.hidden_states[-2])
            else:
                layers = getattr(encoder, "text_model", encoder)
                states.append(layers.final_layer_norm(output.hidden_states[-(clip_skip + 1)]))
        if family is SDXL:
            ends = (ids == tokenizer.eos_token_id).int().argmax(dim=1)
            pooled = encoder.text_projection(output.last_hidden_state[torch.arange(len(ids)), ends])[::chunks]
    return joined(torch.cat(states, dim=-1), chunks), pooled


def encoded(parts: dict[str, Any], texts: Sequence[str], family: Any = SDXL, **options: Any) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor]
    made = family.encode_text(parts, family.tokenize(parts, texts), family.text_recipe(**options))
    return made


@pytest.mark.parametrize("max_length", [150, 225])
@pytest.mark.parametrize(
    ("family", "texts", "clip_skip"),
    [*((SDXL, texts, 0) for texts in (MIXED, ["a cat"], [words(300)])), (SD15, MIXED, 0), (SD15, MIXED, 1)],
    ids=["mixed", "short", "long", "sd15", "sd15-skip"],
)
def test_rows_and_pooled_outputs_are_those_of_sd_scripts(
    family: Any, texts: list[str], clip_skip: int, max_length: int
) -> None:
    parts = tiny_encoders(family.name)
    rows, pooled = reference(family, parts, texts, max_length // 75, clip_skip)
    found = encoded(parts, texts, family, max_length=max_length, clip_skip=clip_skip)
    assert torch.equal(found.pop("prompt_embeds"), rows) and rows.shape[:2] == (len(texts), max_length + 2)
    assert list(found) == (["pooled_prompt_embeds"] if family is SDXL else [])
    assert all(torch.equal(each, pooled) for each in found.values())


@pytest.mark.parametrize("family", [SDXL, SD15], ids=lambda family: family.name)
def test_a_recipe_states_a_length_only_where_it_is_long(family: Any) -> None:
    plain, parts = family.text_recipe(), tiny_encoders(family.name)
    assert "max_length" not in plain
    for length, rows in ((None, 77), (75, 77), (77, 77), (150, 152), (225, 227)):
        recipe = family.text_recipe(max_length=length)
        assert recipe == (plain if rows == 77 else {**plain, "max_length": length})
        assert recipe == family.text_recipe(max_length=length, negative=True)
        assert family.token_limit({}, recipe) == family.token_limit(parts, recipe) == rows
        made = family.encode_text(parts, family.tokenize(parts, ["a cat"]), recipe)
        assert family.text_shapes(parts, recipe) == {name: tensor.shape[1:] for name, tensor in made.items()}
        assert made["prompt_embeds"].shape[1] == rows


@pytest.mark.parametrize(
    ("family", "negative"), [(SDXL, None), (SD15, None), (SD15, "ugly")], ids=["sdxl", "sd15", "sd15-ugly"]
)
def test_images_are_those_of_live_texts(
    make_config: Callable[..., Config], family: Any, negative: str | None, tmp_path: Path
) -> None:
    """diffusers' pipeline of SD 1.5 reads the empty text by itself, and fails, where embeddings have more rows."""
    made: dict[str, Any] = {"num_inference_steps": 2, "guidance_scale": 5.0, "height": 64, "width": 64}
    validation = {"path": tmp_path / "results", "prompts": [words(100)], "negative_prompt": negative}
    encode = {"device": "cpu", "max_length": 225, "batch_size": 1, "text_store_dtype": "float32"}
    config = make_config(**{"model.path": tiny_folder(family.name)}, encode=encode, validation={**validation, **made})
    assert run_precache(config).num_refused == 0
    parts = tiny_model(family.name)
    with LatentCache(config.cache) as cache:
        report = ValidationRunner(parts, cache, config).run(1)
        rows = cache.prompt(words(100), device="cpu")["prompt_embeds"]
    assert report is not None and report.num_filled == 0
    [image] = report.images
    embeds, other = (encoded(parts, [text], family, max_length=225) for text in (words(100), negative or ""))
    assert torch.equal(rows, embeds["prompt_embeds"])
    if negative is None and family.has_zero_negative:
        other = {name: torch.zeros_like(tensor) for name, tensor in other.items()}
    given = embeds | {f"negative_{name}": tensor for name, tensor in other.items()}
    generator = torch.Generator().manual_seed(config.validation.seed)
    expected = family.pipeline(**parts)(**given, **made, generator=generator).images[0]
    assert np.abs(np.asarray(image.image, int) - np.asarray(expected, int)).max() <= 1
