"""Prompts of more than 77 tokens: the ids, the rows and the pooled output that sd-scripts makes of them.

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
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache import (
    BucketBatchSampler,
    Config,
    LatentCache,
    LatentDataset,
    LatentLoader,
    ValidationRunner,
    run_precache,
)
from latentcache.errors import ConfigError, StoreError
from latentcache.families import family_named
from latentcache.loading.status import status
from latentcache.models.tiny import seeded, tiny_part

SDXL, SD15 = family_named("sdxl"), family_named("sd15")
LONG = pytest.mark.parametrize("max_length", [150, 225])
NUM_TOKENS = (0, 1, 73, 74, 75, 76, 77, 148, 149, 150, 151, 152, 223, 224, 225, 226, 227, 300)
GLUED = "!!!!!?"
"""Of five tokens with the id 0, which is the padding of SDXL's second tokenizer, and one other."""


def words(number: int) -> str:
    """A text of so many tokens."""
    return " ".join("abcdefghijklmnopqrstuvwxyz"[at % 26] for at in range(number))


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
    """SDXL's rows and pooled outputs: hidden state 11 of encoder 1, the last but one of encoder 2 and its first end."""
    states = []
    with torch.no_grad():
        for number, layer in (("", 11), ("_2", -2)):
            tokenizer, encoder = parts[f"tokenizer{number}"], parts[f"text_encoder{number}"]
            ids = torch.cat([chunked_ids(tokenizer, text, chunks) for text in texts])
            output = encoder(ids, output_hidden_states=True)
            states.append(output.hidden_states[layer])
        ends = (ids == tokenizer.eos_token_id).int().argmax(dim=1)
        pooled = encoder.text_projection(output.last_hidden_state[torch.arange(len(ids)), ends])
    return joined(torch.cat(states, dim=-1), chunks), pooled[::chunks]


# Models


def clip_encoder(name: str) -> Any:
    """Of twelve layers, as sd-scripts' index of a layer needs them."""
    small = tiny_part(name)
    small.config.num_hidden_layers = 12
    return type(small)(small.config).eval().requires_grad_(False)


@cache
def pair() -> dict[str, Any]:
    """SDXL's text encoders and tokenizers."""
    with seeded(0):
        encoders = {name: clip_encoder(name) for name in SDXL.names("text_encoder")}
    return {**encoders, **{name: tiny_part(name) for name in SDXL.names("tokenizer")}}


def encoded(parts: dict[str, Any], texts: Sequence[str], family: Any = SDXL, **options: Any) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor]
    made = family.encode_text(parts, family.tokenize(parts, texts), family.text_recipe(**options))
    return made


def ids_read(parts: dict[str, Any], text: str, max_length: int) -> list[torch.Tensor]:
    """What each text encoder of SDXL is given for this text."""
    given = list[torch.Tensor]()

    def note(module: Any, arguments: tuple[Any, ...]) -> None:
        given.append(arguments[0])

    handles = [parts[name].register_forward_pre_hook(note) for name in SDXL.names("text_encoder")]
    try:
        encoded(parts, [text], max_length=max_length)
    finally:
        for handle in handles:
            handle.remove()
    return given


# Against the reference


@LONG
@pytest.mark.parametrize("texts", [MIXED, EDGES, ["a cat"], [words(300)]], ids=["mixed", "edges", "short", "long"])
def test_rows_and_pooled_outputs_are_those_of_sd_scripts(max_length: int, texts: list[str]) -> None:
    rows, pooled = reference(pair(), texts, max_length // 75)
    found = encoded(pair(), texts, max_length=max_length)
    assert found["prompt_embeds"].shape == (len(texts), max_length + 2, 72)
    assert torch.equal(found["prompt_embeds"], rows)
    assert torch.equal(found["pooled_prompt_embeds"], pooled)


def test_the_edges_have_the_padding_s_token_first_and_last_in_a_chunk() -> None:
    """Then sd-scripts puts the end in its place, or leaves the chunk without one; else the tests above show nothing."""
    chunks = torch.cat([chunked_ids(pair()["tokenizer_2"], text, 3) for text in EDGES])
    texts = [pair()["tokenizer_2"](text, add_special_tokens=False, verbose=False).input_ids for text in EDGES]
    assert any(ids[75 * at : 75 * at + 1] == [0] for ids in texts for at in (0, 1, 2))
    assert any((chunk[-2:] == 0).all() and pair()["tokenizer_2"].eos_token_id not in chunk for chunk in chunks)


@LONG
@pytest.mark.parametrize("clip_skip", [0, 2])
def test_sd15_reads_each_chunk_with_the_last_norm(max_length: int, clip_skip: int) -> None:
    chunks, tokenizer = max_length // 75, tiny_part("tokenizer")
    with seeded(1):
        parts = {"tokenizer": tokenizer, "text_encoder": clip_encoder("text_encoder")}
    found = encoded(parts, MIXED, SD15, max_length=max_length, clip_skip=clip_skip)
    ids = torch.cat([chunked_ids(tokenizer, text, chunks) for text in MIXED])
    layers = getattr(parts["text_encoder"], "text_model", parts["text_encoder"])
    with torch.no_grad():
        output = parts["text_encoder"](ids, output_hidden_states=True)
        state = layers.final_layer_norm(output.hidden_states[-(clip_skip + 1)])
    assert list(found) == ["prompt_embeds"] and torch.equal(found["prompt_embeds"], joined(state, chunks))


TEXTS = st.text(st.sampled_from("ab!?, é猫\n"), max_size=320) | st.text(max_size=80).map(lambda text: text * 4)


@settings(max_examples=50)
@given(text=TEXTS, max_length=st.sampled_from([150, 225]))
def test_ids_are_those_of_sd_scripts_for_any_text(text: str, max_length: int) -> None:
    parts = tiny_two_layers()
    for number, ids in zip(("", "_2"), ids_read(parts, text, max_length), strict=True):
        assert torch.equal(ids, chunked_ids(parts[f"tokenizer{number}"], text, max_length // 75))


@cache
def tiny_two_layers() -> dict[str, Any]:
    return tiny_encoders("sdxl")


@LONG
def test_a_textual_inversion_s_vectors_are_written_out_and_the_end_is_pooled(max_length: int) -> None:
    parts = tiny_encoders("sdxl")
    for number in ("", "_2"):
        parts[f"tokenizer{number}"].add_tokens(["<toy>", "<toy>_1", "<toy>_2"])
        with seeded(0):
            parts[f"text_encoder{number}"].resize_token_embeddings(len(parts[f"tokenizer{number}"]))
        parts[f"text_encoder{number}"].requires_grad_(False)
    right = encoded(parts, ["<toy>"], max_length=max_length)  # the config names the tokenizer's own end
    for module in parts["text_encoder_2"].modules():
        if hasattr(module, "eos_token_id"):
            module.eos_token_id = 2  # as published: transformers would pool at the largest id, an added token's
    parts["text_encoder_2"].config.eos_token_id = 2
    recipe = SDXL.text_recipe(max_length=max_length) | SDXL.parts_recipe(parts)
    assert recipe["pooled_at"] == "first eos"
    text = f"{words(74)} <toy>"  # its three vectors are in two chunks
    tokens = SDXL.tokenize(parts, ["<toy>", text])
    assert [each.num_tokens for each in tokens] == [5, 79]
    found = SDXL.encode_text(parts, tokens[:1], recipe)
    assert torch.equal(found["pooled_prompt_embeds"], right["pooled_prompt_embeds"])
    for number, ids in zip(("", "_2"), ids_read(parts, text, max_length), strict=True):
        added = parts[f"tokenizer{number}"].convert_tokens_to_ids(["<toy>", "<toy>_1", "<toy>_2"])
        assert ids[0, 75].item() == added[0] and ids[1, 1:3].tolist() == added[1:]


# Settings


@pytest.mark.parametrize("family", [SDXL, SD15], ids=lambda family: family.name)
def test_a_recipe_states_a_length_only_where_it_is_long(family: Any) -> None:
    plain = family.text_recipe()
    assert "max_length" not in plain
    assert family.text_recipe(max_length=75) == family.text_recipe(max_length=77) == plain
    for negative in (False, True):
        recipes = [family.text_recipe(max_length=length, negative=negative) for length in (150, 225)]
        assert recipes == [{**plain, "max_length": 150}, {**plain, "max_length": 225}]
    assert [family.token_limit({}, family.text_recipe(max_length=length)) for length in (None, 75, 150, 225)] == [
        *(77, 77, 152, 227)
    ]
    parts = tiny_encoders(family.name)
    for length, rows in ((None, 77), (150, 152), (225, 227)):
        recipe = family.text_recipe(max_length=length)
        made = family.encode_text(parts, family.tokenize(parts, ["a cat"]), recipe)
        assert family.text_shapes(parts, recipe) == {name: tensor.shape[1:] for name, tensor in made.items()}
        assert made["prompt_embeds"].shape[1] == family.token_limit(parts, recipe) == rows


@pytest.mark.parametrize("length", [1, 76, 151, 227])
def test_other_lengths_are_refused_with_those_that_there_are(length: int) -> None:
    for family in (SDXL, SD15):
        with pytest.raises(ConfigError, match=rf"max_length is {length}, but .* 75 or 77 .*150 .*225") as caught:
            family.text_recipe(max_length=length)
        assert caught.value.key == "encode.max_length"


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


@pytest.mark.parametrize("family", [SDXL, SD15], ids=lambda family: family.name)
@LONG
def test_batches_have_all_rows(filled: Callable[..., Config], family: Any, max_length: int) -> None:
    config, parts = filled(family.name, max_length), tiny_encoders(family.name)
    width = sum(parts[name].config.hidden_size for name in family.names("text_encoder"))
    texts = dict[str, torch.Tensor]()
    sampler = BucketBatchSampler(LatentDataset(config.cache.path), batch_size=2)
    for batch in LatentLoader(sampler, device="cpu"):
        assert batch["prompt_embeds"].shape == (len(batch["caption"]), max_length + 2, width)
        texts |= dict(zip(batch["caption"], batch["prompt_embeds"], strict=True))
    assert len(texts) >= 4
    for text, rows in texts.items():
        assert torch.equal(rows, encoded(parts, [text], family, max_length=max_length)["prompt_embeds"][0])


def test_captions_are_cut_at_the_new_limit(filled: Callable[..., Config], photos: Path) -> None:
    config = filled()
    for _ in range(2):  # as hits too
        report = run_precache(config)
        assert (report.num_truncated_captions, report.truncated_captions) == (1, ["a.png"])
    [found] = [each for each in status(config.cache.path).manifests if each.role != "prompts"]
    assert (found.num_cut, found.cut) == (1, ("a.png",))


@pytest.mark.parametrize("negative", [None, "ugly"])
@pytest.mark.parametrize("family", [SDXL, SD15], ids=lambda family: family.name)
def test_images_are_made_with_and_without_a_negative_prompt(
    filled: Callable[..., Config], family: Any, negative: str | None, tmp_path: Path
) -> None:
    """diffusers' pipeline of SD 1.5 reads the empty text by itself, and fails, where embeddings have more rows."""
    made: dict[str, Any] = {"num_inference_steps": 2, "guidance_scale": 5.0, "height": 64, "width": 64}
    changes = {f"validation.{name}": value for name, value in made.items()} | {"validation.path": tmp_path / "results"}
    changes |= {"validation.prompts": [words(100)], "validation.negative_prompt": negative}
    config = filled(family.name, **changes)
    with LatentCache(config.cache) as cache:
        report = ValidationRunner(tiny_model(family.name), cache, config).run(1)
    assert report is not None and report.num_filled == 0
    [image] = report.images
    parts = tiny_model(family.name)
    embeds, other = (encoded(parts, [text], family, max_length=225) for text in (words(100), negative or ""))
    if negative is None and family.has_zero_negative:
        other = {name: torch.zeros_like(tensor) for name, tensor in other.items()}
    assert embeds["prompt_embeds"].shape == other["prompt_embeds"].shape == (1, 227, embeds["prompt_embeds"].shape[2])
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
