"""Captions -> SDXL's text embeddings, by the pipeline's own code. Legend: B captions, T tokens, D and P features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from diffusers.loaders import TextualInversionLoaderMixin

from latentcache.models.model_files import refused, sdxl_pipeline
from latentcache.models.model_loader import TextParts, inference


@dataclass(frozen=True, slots=True)
class Tokens:
    """Captions as both tokenizers read them: int64 [B, T] each, padded and cut.

    `num_tokens` is the length of each caption uncut, with begin and end: the larger count of the two tokenizers.
    """

    input_ids: torch.Tensor
    input_ids_2: torch.Tensor
    num_tokens: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.num_tokens)

    def rows(self) -> list[Tokens]:
        """Each caption as a batch of one."""
        rows = zip(self.input_ids[:, None], self.input_ids_2[:, None], self.num_tokens, strict=True)
        return [Tokens(first, second, (length,)) for first, second, length in rows]


def join_tokens(rows: Sequence[Tokens]) -> Tokens:
    """One batch of several, in their order."""
    return Tokens(
        torch.cat([tokens.input_ids for tokens in rows]),
        torch.cat([tokens.input_ids_2 for tokens in rows]),
        tuple(length for tokens in rows for length in tokens.num_tokens),
    )


def tokenize(parts: TextParts, captions: Sequence[str]) -> Tokens:
    """Tokens on the CPU, as SDXL's `encode_prompt` requests them of its tokenizers. ValueError without captions.

    A fast tokenizer serves one thread at a time ("Already borrowed"): call this in one thread.
    """
    if not captions:
        raise ValueError("no captions: at least one is needed")
    (input_ids, lengths), (input_ids_2, lengths_2) = (
        _tokenize(tokenizer, _with_all_vectors(list(captions), tokenizer))
        for tokenizer in (parts.tokenizer, parts.tokenizer_2)
    )
    return Tokens(input_ids, input_ids_2, tuple(map(max, lengths, lengths_2)))


def encode_tokens(
    parts: TextParts, tokens: Tokens, *, clip_skip: int = 0, device: torch.device | str | None = None
) -> dict[str, torch.Tensor]:
    """`prompt_embeds` [B, T, D] and `pooled_prompt_embeds` [B, P], T = 77, as SDXL's `encode_prompt` gives them.

    `StableDiffusionXLPipeline.encode_prompt` itself runs, with tokenizers that return the known tokens, so the bits are
    its own for the same batch, device and dtype. The encoders run where they are; both results are on `device`
    (default: the first encoder's). Tokens on the encoders' device are not copied, and then the host waits for nothing.
    `clip_skip` 0 is the penultimate layer. The same caption may differ in the last bits in a batch of another size
    (measured on the CPU: the pooled output does). The attention kernel is the encoders' own: transformers takes torch's
    scaled_dot_product_attention unless a config says otherwise.
    Raises ModelError if the encoders have fewer layers than `clip_skip` needs, or if this diffusers requests tokens in
    another way than one call for all captions.
    """
    # encode_prompt reads hidden_states[-(clip_skip + 2)], and there are num_hidden_layers + 1 of them.
    encoders: tuple[Any, Any] = parts.text_encoder, parts.text_encoder_2
    limit = min(encoder.config.num_hidden_layers for encoder in encoders) - 1
    if not 0 <= clip_skip <= limit:
        raise refused(
            "text_encoder",
            f"clip_skip is {clip_skip}, but these text encoders allow 0 to {limit}. Correct encode.clip_skip.",
        )
    where = next(parts.text_encoder.parameters()).device
    pipeline = sdxl_pipeline(
        text_encoder=_LocatedEncoder(parts.text_encoder),
        text_encoder_2=_LocatedEncoder(parts.text_encoder_2),
        tokenizer=_KnownTokens(tokens.input_ids),
        tokenizer_2=_KnownTokens(tokens.input_ids_2),
    )
    with inference(where):
        prompt_embeds, _, pooled_prompt_embeds, _ = pipeline.encode_prompt(
            [""] * len(tokens),
            device=where,
            do_classifier_free_guidance=False,
            clip_skip=clip_skip or None,
        )
    # diffusers 0.42 moves prompt_embeds only: the pooled output stays on the encoder's device.
    target = where if device is None else torch.device(device)
    return {"prompt_embeds": prompt_embeds.to(target), "pooled_prompt_embeds": pooled_prompt_embeds.to(target)}


def token_limit(parts: TextParts) -> int:
    """The number of tokens, with begin and end, above which a caption is cut: 77 for SDXL."""
    return int(min(parts.tokenizer.model_max_length, parts.tokenizer_2.model_max_length))


# Why two stand-ins, and not our own lines for what `encode_prompt` computes: an entry must have the live pipeline's
# bits, also with the next diffusers. A stand-in is needed because captions are tokenized ahead of the encoders.


class _KnownTokens:
    """Stands in for a tokenizer in `encode_prompt`, and returns the tokens that are known already."""

    def __init__(self, input_ids: torch.Tensor):
        self.input_ids = input_ids
        self.model_max_length = input_ids.shape[-1]

    def tokenize(self, text: str) -> list[str]:
        """No token of several vectors: the captions were expanded before."""
        return []

    def __call__(self, texts: Sequence[str], **options: Any) -> _KnownTokens:
        # A call for other captions than all of the batch would get the wrong tokens.
        if isinstance(texts, str) or any(texts) or len(texts) != len(self.input_ids):
            raise refused(
                "tokenizer",
                f"encode_prompt of diffusers {diffusers.__version__} asks its tokenizer for {texts!r}, not for "
                f"{len(self.input_ids)} captions at once: latentcache does not know this version. Install another one.",
            )
        return self


class _LocatedEncoder:
    """Stands in for a text encoder in `encode_prompt`, and knows its device.

    diffusers 0.42 walks all modules of each encoder twice a call to find it: 1 to 2 ms in which nothing is launched.
    """

    def __init__(self, encoder: torch.nn.Module):
        self._encoder = encoder
        self.device = next(encoder.parameters()).device

    def modules(self) -> Iterator[torch.nn.Module]:
        """None: diffusers looks here for hooks that name a device, and an offloaded encoder moves its inputs itself."""
        return iter(())

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._encoder(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)


def _with_all_vectors(captions: list[str], tokenizer: Any) -> list[str]:
    """The captions with a token for every vector of a textual inversion, as `encode_prompt` expands them.

    diffusers looks each token up in a table that transformers rebuilds for every look-up: most of the time of
    `encode_prompt` apart from the encoders. Without an added token of several vectors it replaces nothing.
    """
    added = tokenizer.added_tokens_encoder
    if not any(f"{token}_1" in added for token in added):
        return captions
    expanded: list[str] = TextualInversionLoaderMixin().maybe_convert_prompt(captions, tokenizer)
    return expanded


def _tokenize(tokenizer: Any, captions: list[str]) -> tuple[torch.Tensor, list[int]]:
    """Token ids [B, T], padded and cut, and the uncut lengths."""
    limit = tokenizer.model_max_length
    tokens = tokenizer(
        captions,
        padding="max_length",
        max_length=limit,
        truncation=True,
        return_attention_mask=True,
        return_tensors="pt",
    )
    lengths = tokens.attention_mask.sum(1).tolist()
    # Only a caption that fills its row may have been cut: its length is counted again.
    full = [number for number, length in enumerate(lengths) if length >= limit]
    if full:
        # Without transformers' warning of captions that are too long: `Tokens.num_tokens` reports them.
        whole = tokenizer([captions[number] for number in full], truncation=False, padding=False, verbose=False)
        for number, ids in zip(full, whole.input_ids, strict=True):
            lengths[number] = len(ids)
    return tokens.input_ids, lengths
