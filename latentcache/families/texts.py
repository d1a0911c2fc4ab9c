"""Texts of a batch: rows for each of them, zeros to the longest, and a mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MASK = "_mask"
"""What follows a field's name in the name of its mask: bool [B, L], True for the rows that are not padding."""


@dataclass(frozen=True, slots=True)
class Caption:
    """A text, as the pipeline takes it, and how many tokens it has as the tokenizer gets it, uncut."""

    text: str
    num_tokens: int


Encoded = dict[str, torch.Tensor]
"""Field -> [B, ...] on the encoders' device. `<field>_mask` (bool [B, L]) says which rows of a field are kept."""


def padded(texts: Sequence[torch.Tensor], field: str = "prompt_embeds") -> Encoded:
    """Texts [n, D] of unequal length as one field with zeros up to the longest, and its mask."""
    embeds = torch.nn.utils.rnn.pad_sequence([*texts], batch_first=True)
    lengths = torch.tensor([[len(text)] for text in texts])
    mask = torch.arange(embeds.shape[1]) < lengths
    return {field: embeds, field + MASK: mask.to(embeds.device)}


def user_turn(tokenizer: Any, content: Any, **options: Any) -> str:
    """A turn of the user in the tokenizer's chat template, and what asks for an answer."""
    message = [{"role": "user", "content": content}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, **options))


def unpadded(batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """The texts of a batch, each [n, D]: what `padded` was given."""
    pairs = zip(batch["prompt_embeds"], batch[f"prompt_embeds{MASK}"], strict=True)
    return [embeds[mask] for embeds, mask in pairs]
