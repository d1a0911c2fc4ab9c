"""Captions -> SDXL's text embeddings, by the pipeline's own code. Legend: B captions, T tokens, D and P features."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from diffusers import StableDiffusionXLPipeline

from latentcache.encoders.models import TextParts, inference
from latentcache.errors import ModelError

# Who says, for each caption that is too long, that it is: and how the message begins.
_TRUNCATION = {
    "diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl": "The following part of your input",
    "transformers.tokenization_utils_base": "Token indices sequence length is longer",
}


def encode_captions(
    parts: TextParts, captions: Sequence[str], *, clip_skip: int = 0, device: torch.device | str | None = None
) -> dict[str, torch.Tensor]:
    """`prompt_embeds` [B, T, D] and `pooled_prompt_embeds` [B, P], T = 77, as SDXL's `encode_prompt` gives them.

    It IS `StableDiffusionXLPipeline.encode_prompt`, so the bits are its own for the same batch, device and dtype. The
    encoders run where they are; both results are on `device` (default: the first encoder's). `clip_skip` 0 is the
    penultimate layer. The same caption may differ in the last bits in a batch of another size (measured on the CPU:
    the pooled output does).
    Raises ModelError if the encoders have fewer layers than `clip_skip` needs, ValueError without captions.
    """
    if not captions:
        raise ValueError("no captions: at least one is needed")
    _check_clip_skip(parts, clip_skip)
    where = next(parts.text_encoder.parameters()).device
    pipeline = StableDiffusionXLPipeline(
        vae=None,
        text_encoder=parts.text_encoder,
        text_encoder_2=parts.text_encoder_2,
        tokenizer=parts.tokenizer,
        tokenizer_2=parts.tokenizer_2,
        unet=None,
        scheduler=None,
        add_watermarker=False,
    )
    with inference(where), _truncation_unsaid():
        prompt_embeds, _, pooled_prompt_embeds, _ = pipeline.encode_prompt(
            list(captions),
            device=where,
            do_classifier_free_guidance=False,
            clip_skip=clip_skip or None,
        )
    # diffusers 0.42 moves prompt_embeds only: the pooled output stays on the encoder's device.
    target = where if device is None else torch.device(device)
    return {"prompt_embeds": prompt_embeds.to(target), "pooled_prompt_embeds": pooled_prompt_embeds.to(target)}


def num_tokens(parts: TextParts, captions: Sequence[str]) -> list[int]:
    """The number of tokens of each caption, uncut, with begin and end; the larger one of the two tokenizers."""
    if not captions:
        return []
    with _truncation_unsaid():
        lengths = [
            [len(ids) for ids in tokenizer(list(captions), truncation=False, padding=False).input_ids]
            for tokenizer in (parts.tokenizer, parts.tokenizer_2)
        ]
    return [max(pair) for pair in zip(*lengths, strict=True)]


def token_limit(parts: TextParts) -> int:
    """The number of tokens, with begin and end, above which a caption is cut: 77 for SDXL."""
    return min(parts.tokenizer.model_max_length, parts.tokenizer_2.model_max_length)


def _check_clip_skip(parts: TextParts, clip_skip: int) -> None:
    # encode_prompt reads hidden_states[-(clip_skip + 2)], and there are num_hidden_layers + 1 of them.
    limit = min(encoder.config.num_hidden_layers for encoder in (parts.text_encoder, parts.text_encoder_2)) - 1
    if not 0 <= clip_skip <= limit:
        raise ModelError(
            f"clip_skip is {clip_skip}, but these text encoders allow 0 to {limit}. Correct encode.clip_skip.",
            part="text_encoder",
        )


@contextmanager
def _truncation_unsaid() -> Iterator[None]:
    """Drop this thread's warnings of truncated captions while inside: `num_tokens` lets the caller count them."""
    thread = threading.get_ident()

    def keeps(record: logging.LogRecord) -> bool:
        return record.thread != thread or not str(record.msg).startswith(_TRUNCATION[record.name])

    loggers = [logging.getLogger(name) for name in _TRUNCATION]
    for logger in loggers:
        logger.addFilter(keeps)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keeps)
