"""Texts read by CLIP as in Stable Diffusion: one or two encoders, 77 tokens or more, optional clip skip.

Texts longer than 77 tokens are read like in sd-scripts with `max_token_length` 150 or 225 (its strategy_base.py,
strategy_sd.py, strategy_sdxl.py): in chunks of 75, each with BOS and EOS, whose rows are then concatenated.

    chunk 1   B a a a ... a E          rows   B a a a ... a  b b b ... b  c c ... E     75 n + 2
    chunk 2   B b b b ... b E
    chunk 3   B c c E E ... E          the pooled output is chunk 1's

Legend: B captions, n chunks, T tokens, D and P features.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import override

from latentcache.devices.transfer import transfer_to
from latentcache.errors import ConfigError, ModelError
from latentcache.families.base import Encoded, Family, inference

CLIP_SETTINGS = (
    *("is_encoder_decoder", "vocab_size", "hidden_size", "intermediate_size", "projection_dim", "num_hidden_layers"),
    *("num_attention_heads", "max_position_embeddings", "hidden_act", "layer_norm_eps"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "dropout"),
)
"""Settings of a CLIP text encoder. Ones without effect, such as `dropout`, stay for the sake of existing keys."""
CHUNK = 75
"""Tokens of a text that CLIP reads at once, not counting BOS and EOS."""
LONG_BY_ROWS = {152: 150, 227: 225}
"""Rows of the embeddings of texts read in chunks -> their `max_length`."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A caption's ids from each tokenizer: int64 [1, T], padded and truncated; and untruncated, with BOS and EOS."""

    input_ids: tuple[torch.Tensor, ...]
    uncut: tuple[Sequence[int], ...]

    @property
    def num_tokens(self) -> int:
        """Its untruncated length with BOS and EOS, the maximum over the tokenizers."""
        return max(map(len, self.uncut))


class ClipFamily(Family):
    """A family whose texts are read by CLIP only. `clip_skip` 0 is the layer that its pipeline uses."""

    text_dtype = "float16"
    max_length = 77
    can_drop_padding = False
    takes_masked = True
    needed_of_scheduler = ("init_noise_sigma", "order", "scale_model_input", "set_timesteps", "step")
    layers_above: ClassVar[int]
    """How many of the last layers are unused with `clip_skip` 0."""

    @override
    def text_recipe(self, *, negative: bool = False, **settings: Any) -> dict[str, Any]:
        """Like `Family.text_recipe`. diffusers applies clip_skip to positive prompts only."""
        super().text_recipe(**{**settings, "clip_skip": 0})
        length = settings.get("max_length")
        is_long = length in LONG_BY_ROWS.values()
        if not is_long and length not in (None, CHUNK, self.max_length):
            message = f"max_length is {length}, but CLIP takes null, 75 or 77 (one chunk), 150 (two) or 225 (three)"
            raise ConfigError(message, key="encode.max_length")
        # Keys of a single chunk leave it out, for caches older than the setting.
        stated = {"max_length": length} if is_long else {}
        return {**self.recipe, "clip_skip": 0 if negative else settings.get("clip_skip", 0), **stated}

    @override
    def parts_recipe(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Like `Family.parts_recipe`: where the pooled output is taken, if the family has one."""
        if not any(not field.has_rows for field in self.fields.values()):
            return {}
        return pooling_recipe(parts[self.names("text_encoder")[-1]], parts[self.names("tokenizer")[-1]])

    @override
    def tokenize(self, parts: Mapping[str, Any], texts: Sequence[str]) -> list[Tokens]:
        """Token ids on the CPU, made like in `encode_prompt`.

        Not thread-safe: a fast tokenizer used by two threads raises "Already borrowed".
        """
        tokenizers = [parts[name] for name in self.names("tokenizer")]
        # One token per vector of a textual inversion.
        expanded = importlib.import_module("diffusers.loaders").TextualInversionLoaderMixin().maybe_convert_prompt
        read = [_tokenize(tokenizer, expanded(list(texts), tokenizer)) for tokenizer in tokenizers]
        ids = zip(*[torch.split(input_ids, 1) for input_ids, _ in read], strict=True)
        uncut = zip(*[whole for _, whole in read], strict=True)
        return [Tokens(rows, each) for rows, each in zip(ids, uncut, strict=True)]

    @override
    def token_limit(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> int:
        if (num_chunks := _num_chunks(recipe)) > 1:
            return CHUNK * num_chunks + 2
        known = (parts[name].model_max_length for name in self.names("tokenizer") if name in parts)
        return int(min(known, default=self.max_length))

    @override
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Tokens], recipe: Mapping[str, Any]) -> Encoded:
        """Like `Family.encode_text`, bit for bit the pipeline's `encode_prompt` for the same batch, device and dtype.

        Texts in chunks match sd-scripts; the encoders then get a batch of B n. Nothing synchronises with the host. The
        batch size may change a caption's last bits (measured on the CPU, for the pooled output).
        Raises ModelError if the encoders have fewer layers than `clip_skip` needs.
        """
        skip: int = recipe["clip_skip"]
        names = self.names("text_encoder")
        limit = min(parts[name].config.num_hidden_layers for name in names) - self.layers_above
        if not 0 <= skip <= limit:
            message = f"clip_skip is {skip}, but these text encoders allow 0 to {limit}. Correct encode.clip_skip."
            raise ModelError(f"text_encoder: {message}", part="text_encoder")
        where = next(parts[names[0]].parameters()).device
        num_chunks = _num_chunks(recipe)
        if num_chunks == 1:  # unlike several chunks: the tokenizer itself pads, and no EOS is inserted
            columns = [torch.cat(column) for column in zip(*[each.input_ids for each in texts], strict=True)]
        else:
            read = zip(self.names("tokenizer"), zip(*[each.uncut for each in texts], strict=True), strict=True)
            columns = [_chunk_ids(parts[name], uncut, num_chunks) for name, uncut in read]
        states = []
        with inference(where), pooling(parts[names[-1]], parts[self.names("tokenizer")[-1]], recipe):
            for name, column in zip(names, columns, strict=True):
                encoder = parts[name]
                ids = transfer_to(next(encoder.parameters()).device).upload(column)
                output = encoder(ids, output_hidden_states=True)
                # An encoder with offloading hooks may return its output on another device.
                states.append(self.read_state(encoder, output, skip).to(where))
        made = {"prompt_embeds": _joined(torch.cat(states, dim=-1), num_chunks)}
        if len(self.fields) == 1:
            return made
        return {**made, "pooled_prompt_embeds": output.text_embeds[::num_chunks].to(where)}

    @abstractmethod
    def read_state(self, encoder: Any, output: Any, skip: int) -> torch.Tensor:
        """The hidden state [B, T, D] that the pipeline reads from an encoder's output with this `clip_skip`."""

    @override
    def text_shapes(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        configs = [parts[name].config for name in self.names("text_encoder")]
        length = self.token_limit(parts, recipe)
        shapes = [(length, sum(config.hidden_size for config in configs)), (configs[-1].projection_dim,)]
        return dict(zip(self.fields, shapes, strict=False))


def pooling_recipe(encoder: Any, tokenizer: Any) -> dict[str, str]:
    """What the recipe states if transformers would mistake an added token for EOS; otherwise nothing.

    It pools at the largest id if the encoder's config has `eos_token_id` 2, as published ones do. Added tokens, for
    example of a textual inversion, have larger ids than the tokenizer's EOS.
    """
    has_larger = max(tokenizer.get_vocab().values()) > tokenizer.eos_token_id
    return {"pooled_at": "first eos"} if encoder.config.eos_token_id == 2 and has_larger else {}


@contextmanager
def pooling(encoder: Any, tokenizer: Any, recipe: Mapping[str, Any]) -> Iterator[None]:
    """While inside, the encoder pools at the tokenizer's first EOS if the recipe says so, like in sd-scripts.

    Restored afterwards, as the encoder may be a trainer's.
    """
    found = [module for module in encoder.modules() if hasattr(module, "eos_token_id")] if "pooled_at" in recipe else []
    before = [module.eos_token_id for module in found]
    try:
        for module in found:
            module.eos_token_id = tokenizer.eos_token_id
        yield
    finally:
        for module, number in zip(found, before, strict=True):
            module.eos_token_id = number


def _tokenize(tokenizer: Any, captions: list[str]) -> tuple[torch.Tensor, list[list[int]]]:
    """Token ids [B, T], padded and truncated, and the untruncated ones."""
    limit = tokenizer.model_max_length
    # verbose=False: without transformers' warning about long captions, which `Tokens.num_tokens` reports.
    whole = tokenizer(captions, truncation=False, padding=False, verbose=False).input_ids
    tokens = tokenizer(captions, padding="max_length", max_length=limit, truncation=True, return_tensors="pt")
    return tokens.input_ids, whole


def _num_chunks(recipe: Mapping[str, Any]) -> int:
    return int(recipe.get("max_length", CHUNK)) // CHUNK


def _chunk_ids(tokenizer: Any, texts: Iterable[Sequence[int]], num_chunks: int) -> torch.Tensor:
    """Untruncated texts split into chunks, like sd-scripts splits the padded text: int64 [B n, 77].

    Each chunk ends with the last id of the padded text. If the padding id is not EOS, full and empty chunks get an
    EOS. Both are recognised by ids only, so a text's own token with the padding id counts as padding.
    """
    eos, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    chunks = []
    for bos, *ids, _ in texts:
        padded = [*ids[: CHUNK * num_chunks], eos]
        padded += [padding] * (CHUNK * num_chunks + 1 - len(padded))
        for start in range(0, CHUNK * num_chunks, CHUNK):
            chunk = [bos, *padded[start : start + CHUNK], padded[-1]]
            if chunk[-2] not in (eos, padding):
                chunk[-1] = eos
            if chunk[1] == padding:
                chunk[1] = eos
            chunks.append(chunk)
    return torch.tensor(chunks)


def _joined(states: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """Chunks joined, without the BOS and EOS between them: [B n, 77, D] -> [B, 75 n + 2, D]."""
    if num_chunks == 1:
        return states
    chunks = states.unflatten(0, (-1, num_chunks)).unbind(1)
    return torch.cat([chunks[0][:, :1], *[chunk[:, 1:-1] for chunk in chunks], chunks[-1][:, -1:]], dim=1)
