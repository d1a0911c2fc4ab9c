"""Ideogram 4 with texts stored after the denoiser's own text projection: 9 KB per token instead of 104 KB."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from typing_extensions import override

from latentcache.errors import ModelError
from latentcache.families.base import Caption, Encoded, TextField
from latentcache.families.ideogram4 import Ideogram4
from latentcache.families.parts import Part
from latentcache.types import Padding

_WHOLE = Ideogram4.name
_WIDTH = "num_attention_heads * attention_head_dim"
_LAYERS = ("llm_cond_norm", "llm_cond_proj")


class Ideogram4Projected(Ideogram4):
    """Texts as they enter the denoiser's sequence: normalised and projected by its own two text layers.

    These layers are frozen and part of the key. In `predict` and `pipeline` they pass their input through.
    """

    name = "ideogram4-projected"
    whole = _WHOLE
    parts = {
        **Ideogram4.parts,
        # The denoiser without its transformer blocks.
        "projection": Part(
            "text_encoder",
            Ideogram4.denoiser_class,
            tuple(f"{layer}." for layer in _LAYERS),
            folder=Ideogram4.denoiser,
            changed={"num_layers": 0},
        ),
    }
    fields = {"prompt_embeds": TextField(_WIDTH, Padding(), (4608,), encoder="projection")}
    recipe = {**Ideogram4.recipe, "cut": "projection"}

    @override
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Caption], recipe: Mapping[str, Any]) -> Encoded:
        made, projection = super().encode_text(parts, texts, recipe), parts["projection"]
        rows = projection.llm_cond_norm(made["prompt_embeds"].to(projection.dtype))
        return {**made, "prompt_embeds": projection.llm_cond_proj(rows)}

    @override
    def text_shapes(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        config, field = parts["projection"].config, self.fields["prompt_embeds"]
        return {"prompt_embeds": (recipe["max_length"], field.width_in(config))}

    @override
    def predict(
        self, denoiser: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Mapping[str, Any]
    ) -> torch.Tensor:
        """Like `Family.predict`. ModelError for a denoiser whose projection is trained or has adapters."""
        with _projecting_nothing(denoiser):
            return super().predict(denoiser, noisy, timesteps, batch)

    @override
    def pipeline(self, **parts: Any) -> Any:
        """Ideogram 4's pipeline. With a denoiser it is a function that takes projected texts."""
        made = super().pipeline(**parts)
        if "transformer" not in parts:
            return made

        def run(**options: Any) -> Any:
            with _projecting_nothing(parts["transformer"]):
                return made(**options)

        return run


@contextmanager
def _projecting_nothing(denoiser: Any) -> Iterator[None]:
    """While inside, the denoiser's text layers pass their input through. The denoiser may be wrapped.

    Raises ModelError unless both layers exist and are frozen: training them has no effect on projected texts.
    """
    layers = [layer for name, layer in denoiser.named_modules() if name.rpartition(".")[2] in _LAYERS]
    if len(layers) != len(_LAYERS):
        raise ModelError(
            f"transformer: it lacks one of {', '.join(_LAYERS)}. Pass the model's own.", part="transformer"
        )
    names, weights = " or ".join(_LAYERS), [[*layer.parameters()] for layer in layers]
    if not all(weights):
        raise ModelError(
            f"transformer: {names} has no parameters of its own, so nothing shows whether it is trained. Shard the "
            "model with fully_shard, or with use_orig_params=True.",
            part="transformer",
        )
    has_adapters = any(len([*layer.modules()]) > 1 for layer in layers)
    if has_adapters or any(each.requires_grad for own in weights for each in own):
        raise ModelError(
            f"transformer: {names} is trained or has adapters, but cached texts were projected before. Freeze it "
            f"(requires_grad_(False)) and leave it out of the LoRA's targets, or set model.family to {_WHOLE}.",
            part="transformer",
        )
    before = [vars(layer).get("forward") for layer in layers]  # hooks of accelerate and diffusers set it
    try:
        for layer in layers:
            layer.forward = _unchanged
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def _unchanged(rows: torch.Tensor) -> torch.Tensor:
    return rows


FAMILY = Ideogram4Projected()
