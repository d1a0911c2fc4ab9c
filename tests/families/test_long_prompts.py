"""Prompts of more than 77 tokens: the rows and the pooled output that sd-scripts makes of them.

The reference here was compared bit by bit with the strategies of sd-scripts 48d368f on encoders like these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_models import tiny_encoders, tiny_folder, tiny_model

from latentcache import (
    BucketBatchSampler,
    Config,
    LatentCache,
    LatentDataset,
    LatentLoader,
    ValidationRunner,
    run_precache,
)
from latentcache.errors import StoreError
from latentcache.families import family_named
from latentcache.loading.status import status

SDXL, SD15 = family_named("sdxl"), family_named("sd15")
LONG = pytest.mark.parametrize("max_length", [150, 225])
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


def reference(parts: dict[str, Any], texts: Sequence[str], chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """SDXL's rows and pooled outputs: of both encoders the last state but one, and encoder 2's at its first end."""
    states = []
    with torch.no_grad():
        for number in ("", "_2"):
            tokenizer, encoder = parts[f"tokenizer{number}"], parts[f"text_encoder{number}"]
            ids = torch.cat([chunked_ids(tokenizer, text, chunks) for text in texts])
            output = encoder(ids, output_hidden_states=True)
            states.append(output.hidden_states[-2])
        ends = (ids == tokenizer.eos_token_id).int().argmax(dim=1)
        pooled = encoder.text_projection(output.last_hidden_state[torch.arange(len(ids)), ends])
    return joined(torch.cat(states, dim=-1), chunks), pooled[::chunks]


def encoded(parts: dict[str, Any], texts: Sequence[str], family: Any = SDXL, **options: Any) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor]
    made = family.encode_text(parts, family.tokenize(parts, texts), family.text_recipe(**options))
    return made


@cache
def pair() -> dict[str, Any]:
    return tiny_encoders("sdxl")


@LONG
@pytest.mark.parametrize("texts", [MIXED, ["a cat"], [words(300)]], ids=["mixed", "short", "long"])
def test_rows_and_pooled_outputs_are_those_of_sd_scripts(max_length: int, texts: list[str]) -> None:
    rows, pooled = reference(pair(), texts, max_length // 75)
    found = encoded(pair(), texts, max_length=max_length)
    assert found["prompt_embeds"].shape == (len(texts), max_length + 2, 72)
    assert torch.equal(found["prompt_embeds"], rows)
    assert torch.equal(found["pooled_prompt_embeds"], pooled)


@LONG
@pytest.mark.parametrize("clip_skip", [0, 1])
def test_sd15_reads_each_chunk_with_the_last_norm(max_length: int, clip_skip: int) -> None:
    chunks, parts = max_length // 75, tiny_encoders("sd15")
    found = encoded(parts, MIXED, SD15, max_length=max_length, clip_skip=clip_skip)
    ids = torch.cat([chunked_ids(parts["tokenizer"], text, chunks) for text in MIXED])
    layers = getattr(parts["text_encoder"], "text_model", parts["text_encoder"])
    with torch.no_grad():
        output = parts["text_encoder"](ids, output_hidden_states=True)
        state = layers.final_layer_norm(output.hidden_states[-(clip_skip + 1)])
    assert list(found) == ["prompt_embeds"] and torch.equal(found["prompt_embeds"], joined(state, chunks))


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


# From end to end


@pytest.fixture
def filled(make_config: Callable[..., Config], photos: Path) -> Callable[..., Config]:
    """Runs with texts of 0 to 300 tokens, and one photo more. Returns the config."""

    def filled(family: str = "sdxl", max_length: int = 225, **changes: Any) -> Config:
        for name, number in (("a", 226), ("b", 225), ("c", 80)):
            (photos / f"{name}.txt").write_text(words(number))
        options = {"model.path": tiny_folder(family), "encode.max_length": max_length, "encode.batch_size": 1}
        config = make_config(**options, **{"encode.text_store_dtype": "float32"}, **changes)
        assert run_precache(config).num_refused == 0
        return config

    return filled


@pytest.mark.parametrize(("family", "max_length"), [(SDXL, 225), (SD15, 150)], ids=["sdxl", "sd15"])
def test_batches_have_all_rows(filled: Callable[..., Config], family: Any, max_length: int) -> None:
    config, parts = filled(family.name, max_length), tiny_encoders(family.name)
    texts = dict[str, torch.Tensor]()
    for batch in LatentLoader(BucketBatchSampler(LatentDataset(config.cache.path), batch_size=2), device="cpu"):
        texts |= dict(zip(batch["caption"], batch["prompt_embeds"], strict=True))
    assert len(texts) >= 4
    for text, rows in texts.items():
        assert torch.equal(rows, encoded(parts, [text], family, max_length=max_length)["prompt_embeds"][0])


def test_captions_are_cut_at_the_new_limit(filled: Callable[..., Config]) -> None:
    config = filled()
    for _ in range(2):  # as hits too
        report = run_precache(config)
        assert (report.num_truncated_captions, report.truncated_captions) == (1, ["a.png"])
    [found] = [each for each in status(config.cache.path).manifests if each.role != "prompts"]
    assert (found.num_cut, found.cut) == (1, ("a.png",))


@pytest.mark.parametrize(
    ("family", "negative"), [(SDXL, None), (SD15, None), (SD15, "ugly")], ids=["sdxl", "sd15", "sd15-ugly"]
)
def test_images_are_made_with_and_without_a_negative_prompt(
    filled: Callable[..., Config], family: Any, negative: str | None, tmp_path: Path
) -> None:
    """diffusers' pipeline of SD 1.5 reads the empty text by itself, and fails, where embeddings have more rows."""
    made: dict[str, Any] = {"num_inference_steps": 2, "guidance_scale": 5.0, "height": 64, "width": 64}
    changes = {f"validation.{name}": value for name, value in made.items()} | {"validation.path": tmp_path / "results"}
    changes |= {"validation.prompts": [words(100)], "validation.negative_prompt": negative}
    config, parts = filled(family.name, **changes), tiny_model(family.name)
    with LatentCache(config.cache) as cache:
        report = ValidationRunner(parts, cache, config).run(1)
    assert report is not None and report.num_filled == 0
    [image] = report.images
    embeds, other = (encoded(parts, [text], family, max_length=225) for text in (words(100), negative or ""))
    if negative is None and family.has_zero_negative:
        other = {name: torch.zeros_like(tensor) for name, tensor in other.items()}
    texts = embeds | {f"negative_{name}": tensor for name, tensor in other.items()}
    generator = torch.Generator().manual_seed(config.validation.seed)
    expected = family.pipeline(**parts)(**texts, **made, generator=generator).images[0]
    assert np.abs(np.asarray(image.image, int) - np.asarray(expected, int)).max() <= 1


def test_datasets_of_two_lengths_are_not_mixed(make_config: Callable[..., Config]) -> None:
    lengths = {"short": None, "two": 150, "three": 225}
    for name, length in lengths.items():
        config = make_config(**{"datasets.0.name": name, "encode.max_length": length})
        run_precache(config)
    for pair_of in (["short", "three"], ["two", "three"]):
        with pytest.raises(StoreError, match=rf"texts of {', '.join(pair_of)} .*max_length.*Precache all with one"):
            LatentDataset(config.cache.path, pair_of)
    assert len(LatentDataset(config.cache.path, ["three"])) == 5
