"""Text by CLIP, as Stable Diffusion reads it: one encoder or two, 77 tokens, and layers that may be skipped.

Legend: B captions, T tokens, D and P features.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import override

from latentcache.errors import ConfigError, ModelError
from latentcache.families.base import Encoded, Family, Upload, inference

CLIP_SETTINGS = (
    *("is_encoder_decoder", "vocab_size", "hidden_size", "intermediate_size", "projection_dim", "num_hidden_layers"),
    *("num_attention_heads", "max_position_embeddings", "hidden_act", "layer_norm_eps"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "dropout"),
)
"""Settings of a text encoder of CLIP. With those that change nothing, as `dropout`: keys of SDXL were made so."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A caption as each tokenizer reads it: int64 [1, T], padded and cut.

    `num_tokens` is its length uncut, with begin and end: the largest count of the tokenizers.
    """

    input_ids: tuple[torch.Tensor, ...]
    num_tokens: int


class ClipFamily(Family):
    """A family whose texts go through CLIP alone. `clip_skip` 0 is the layer that its pipeline takes."""

    text_dtype = "float16"
    max_length = 77
    can_drop_padding = False
    takes_masked = True
    needed_of_scheduler = ("init_noise_sigma", "order", "scale_model_input", "set_timesteps", "step")
    layers_above: ClassVar[int]
    """How many of the last layers are not read with `clip_skip` 0."""

    @override
    def text_recipe(self, *, negative: bool = False, **settings: Any) -> dict[str, Any]:
        """As `Family.text_recipe`. diffusers applies clip_skip to positive prompts only."""
        super().text_recipe(**{**settings, "clip_skip": 0})
        if settings.get("max_length") not in (None, self.max_length):
            message = f"max_length is {settings['max_length']}, but CLIP takes {self.max_length} tokens. Set it to null"
            raise ConfigError(message, key="encode.max_length")
        return {**self.recipe, "clip_skip": 0 if negative else settings.get("clip_skip", 0)}

    @override
    def parts_recipe(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """As `Family.parts_recipe`: where the pooled output is taken, if the family has one."""
        if not any(not field.has_rows for field in self.fields.values()):
            return {}
        return pooling_recipe(parts[self.names("text_encoder")[-1]], parts[self.names("tokenizer")[-1]])

    @override
    def tokenize(self, parts: Mapping[str, Any], texts: Sequence[str]) -> list[Tokens]:
        """Tokens on the CPU, as `encode_prompt` requests them of its tokenizers. ValueError without texts.

        A fast tokenizer serves one thread at a time ("Already borrowed"): call this in one thread.
        """
        if not texts:
            raise ValueError("no captions: at least one is needed")
        tokenizers = [parts[name] for name in self.names("tokenizer")]
        read = [_tokenize(tokenizer, _with_all_vectors(list(texts), tokenizer)) for tokenizer in tokenizers]
        ids = zip(*[torch.split(input_ids, 1) for input_ids, _ in read], strict=True)
        lengths = [max(each) for each in zip(*[lengths for _, lengths in read], strict=True)]
        return [Tokens(rows, length) for rows, length in zip(ids, lengths, strict=True)]

    @override
    def token_limit(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> int:
        known = (parts[name].model_max_length for name in self.names("tokenizer") if name in parts)
        return int(min(known, default=self.max_length))

    @override
    def encode_text(
        self, parts: Mapping[str, Any], texts: Sequence[Tokens], recipe: Mapping[str, Any], *, upload: Upload = None
    ) -> Encoded:
        """As `Family.encode_text`: the bits of the pipeline's `encode_prompt` for the same batch, device and dtype.

        Tokens that `upload` brought to the encoders' device are not copied, and then the host waits for nothing. The
        same caption may differ in the last bits in a batch of another size (measured on the CPU: the pooled output
        does). The attention kernel is the encoders' own: transformers takes torch's scaled_dot_product_attention unless
        a config says otherwise. Raises ModelError if the encoders have fewer layers than `clip_skip` needs.
        """
        skip: int = recipe["clip_skip"]
        names = self.names("text_encoder")
        limit = min(parts[name].config.num_hidden_layers for name in names) - self.layers_above
        if not 0 <= skip <= limit:
            message = f"clip_skip is {skip}, but these text encoders allow 0 to {limit}. Correct encode.clip_skip."
            raise ModelError(f"text_encoder: {message}", part="text_encoder")
        where = next(parts[names[0]].parameters()).device
        columns = [torch.cat(column) for column in zip(*[each.input_ids for each in texts], strict=True)]
        states = []
        with inference(where), pooling(parts[names[-1]], parts[self.names("tokenizer")[-1]], recipe):
            for name, column in zip(names, columns, strict=True):
                encoder = parts[name]
                ids = (column if upload is None else upload(column)).to(next(encoder.parameters()).device)
                output = encoder(ids, output_hidden_states=True)
                # One that moves itself may leave its output elsewhere.
                states.append(self.read_state(encoder, output, skip).to(where))
        made = {"prompt_embeds": torch.cat(states, dim=-1)}
        return made if len(self.fields) == 1 else {**made, "pooled_prompt_embeds": output.text_embeds.to(where)}

    @abstractmethod
    def read_state(self, encoder: Any, output: Any, skip: int) -> torch.Tensor:
        """The rows [B, T, D] that the pipeline reads of an encoder's output with this `clip_skip`."""

    @override
    def text_shapes(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        configs = [parts[name].config for name in self.names("text_encoder")]
        length = self.token_limit(parts, recipe)
        shapes = [(length, sum(config.hidden_size for config in configs)), (configs[-1].projection_dim,)]
        return dict(zip(self.fields, shapes, strict=False))


def pooling_recipe(encoder: Any, tokenizer: Any) -> dict[str, str]:
    """What a recipe says where transformers would take an added token for the end of a text; else nothing.

    It pools at the largest id where the encoder's config has 2 as `eos_token_id`, as published ones do. Tokens that
    were added, as a textual inversion adds them, have larger ids than the tokenizer's end.
    """
    has_larger = max(tokenizer.get_vocab().values()) > tokenizer.eos_token_id
    return {"pooled_at": "first eos"} if encoder.config.eos_token_id == 2 and has_larger else {}


@contextmanager
def pooling(encoder: Any, tokenizer: Any, recipe: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the encoder pools as the recipe says: at the first of the tokenizer's own ends, or as it does by itself.

    sd-scripts does the same. Restored afterwards: the encoder may be a trainer's.
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


def _with_all_vectors(captions: list[str], tokenizer: Any) -> list[str]:
    """The captions with a token for every vector of a textual inversion, as `encode_prompt` expands them.

    diffusers looks each token up in a table that transformers rebuilds for every look-up: most of the time of
    `encode_prompt` apart from the encoders. Without an added token of several vectors it replaces nothing.
    """
    added = tokenizer.added_tokens_encoder
    if not any(f"{token}_1" in added for token in added):
        return captions
    mixin = importlib.import_module("diffusers.loaders").TextualInversionLoaderMixin()
    expanded: list[str] = mixin.maybe_convert_prompt(captions, tokenizer)
    return expanded


def _tokenize(tokenizer: Any, captions: list[str]) -> tuple[torch.Tensor, list[int]]:
    """Token ids [B, T], padded and cut, and the uncut lengths."""
    limit = tokenizer.model_max_length
    # Without transformers' warning of captions that are too long: `Tokens.num_tokens` reports them.
    whole = tokenizer(captions, truncation=False, padding=False, verbose=False).input_ids
    tokens = tokenizer(captions, padding="max_length", max_length=limit, truncation=True, return_tensors="pt")
    return tokens.input_ids, [len(ids) for ids in whole]
