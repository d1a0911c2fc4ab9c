"""Anima with texts before the conditioner: one cache serves every checkpoint, each with its own conditioner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from latentcache.errors import ModelError
from latentcache.families.anima import Anima, conditioned
from latentcache.families.base import MASK, Caption, Encoded, TextField
from latentcache.types import Padding

_NAMES = {
    "qwen_embeds": "qwen_prompt_embeds",
    f"qwen_embeds{MASK}": "qwen_attention_mask",
    "t5_ids": "t5_input_ids",
    f"t5_ids{MASK}": "t5_attention_mask",
}
"""The text fields of a batch, and their names in diffusers' blocks."""


class AnimaStates(Anima):
    """Qwen3's last layer and the ids of T5's tokens. The conditioner runs in `predict`, and can be trained.

    It is the attribute `text_conditioner` of the denoiser. `load_denoiser` sets it; your own training has to.
    """

    name = "anima-states"
    whole = "anima"
    parts = {name: part for name, part in Anima.parts.items() if name != "text_conditioner"}
    fields = {
        "qwen_embeds": TextField(None, Padding(), (1024,), may_be_zero=True),
        "t5_ids": TextField(None, Padding()),
    }
    recipe = {"cut": "states", "t5_ids_dtype": "int32"}
    reads_lengths = True

    @override
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Caption], recipe: Mapping[str, Any]) -> Encoded:
        found = self.states(parts, texts, recipe)
        # The empty text has no Qwen3 token. It keeps one row of zeros, which gives the same result.
        found["qwen_attention_mask"][:, 0] = 1
        return {name: found[own].bool() if name.endswith(MASK) else found[own] for name, own in _NAMES.items()}

    @override
    def text_shapes(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        length = recipe["max_length"]
        return {"qwen_embeds": (length, parts["text_encoder"].config.hidden_size), "t5_ids": (length,)}

    @override
    def conditions(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Like `Family.conditions`. ModelError for a denoiser without a conditioner."""
        conditioner = self._conditioner(denoiser, noisy.device)
        states = self.text_kwargs(batch) | {"qwen_prompt_embeds": batch["qwen_embeds"].to(conditioner.dtype)}
        embeds = conditioned(conditioner, states).to(noisy.dtype)
        return super().conditions(denoiser, noisy, {"prompt_embeds": embeds})

    def _conditioner(self, denoiser: Any, device: torch.device) -> Any:
        """The denoiser's conditioner, moved to `device`. ModelError if it has none."""
        conditioner = getattr(denoiser, "text_conditioner", None)
        if conditioner is None:
            message = f"{type(denoiser).__name__} has no text_conditioner, which the texts of {self.name} need"
            step = "Set it: transformer.__dict__['text_conditioner'] = pipeline.text_conditioner"
            raise ModelError(f"{self.denoiser}: {message}. {step}", part=self.denoiser)
        return conditioner.to(device)

    @override
    def text_kwargs(self, embeds: Mapping[str, Any]) -> dict[str, Any]:
        return {own: embeds[name] for name, own in _NAMES.items()}

    @override
    def pipeline(self, **parts: Any) -> Any:
        """Anima's pipeline with the conditioner in front of the denoising blocks."""
        conditioner = self._conditioner(parts["transformer"], parts["transformer"].device)
        return super().pipeline(text_conditioner=conditioner, **parts)


FAMILY = AnimaStates()
