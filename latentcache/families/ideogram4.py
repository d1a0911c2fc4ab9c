"""Ideogram 4. Its VAE is FLUX.2's with its own statistics, in a different channel order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from latentcache.errors import ConfigError, ModelError
from latentcache.families.base import (
    MASK,
    Caption,
    Encoded,
    Family,
    LatentSpace,
    TextField,
    TimestepSampling,
    unpadded,
    user_turn,
)
from latentcache.families.flux2 import Flux2
from latentcache.families.parts import LLM_SETTINGS, Part, layers_below
from latentcache.types import Padding

_LAYERS = (0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 35)
"""Decoder layers whose outputs are interleaved by feature: the pipeline's `QWEN3_VL_ACTIVATION_LAYERS`."""
_BLOCK = 128
"""Texts are padded to a multiple of this many rows. More padding gives the same rows."""


class _NoGuidance:
    """Stand-in for the model's unconditional transformer, whose weight is 0 at guidance 1."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def __call__(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
        return (torch.zeros_like(hidden_states),)


class Ideogram4(Family):
    """Thirteen layers of Qwen3-VL per token, interleaved by feature, and FLUX.2's VAE with the model's statistics.

    Latents are scaled in FLUX.2's layout, and reordered to the denoiser's channel order when it is called. There is no
    negative prompt: guidance needs the model's second transformer.
    """

    name = "ideogram4"
    pipeline_name = "Ideogram4Pipeline"
    repositories = ("ideogram-ai/ideogram-4-nf4-diffusers",)
    parts = {
        "vae": Flux2.parts["vae"],
        "text_encoder": Part(
            "text_encoder", "transformers.Qwen3VLModel", layers_below("language_model.", _LAYERS[-1] + 1), LLM_SETTINGS
        ),
        "tokenizer": Part("tokenizer", "transformers.AutoTokenizer"),
    }
    denoiser_class = "diffusers.Ideogram4Transformer2DModel"
    latent, patch = LatentSpace(32, draws=False), 2
    fields = {"prompt_embeds": TextField("llm_features_dim", Padding(), (53248,))}
    max_length = longest = 2048
    num_joined = len(_LAYERS)
    recipe = {"layers": " ".join(map(str, _LAYERS))}
    template_needs_tokenizer, can_keep_padding = True, False
    no_guidance = math.inf
    # Like train_dreambooth_lora_ideogram4.py at 1024x1024, where the mean is log(2).
    timesteps = TimestepSampling("logit_normal", shift=2.0, deviation=1.5)
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3")

    @override
    def pipeline(self, **parts: Any) -> Any:
        """Like `Family.pipeline`. Without a text encoder, prompts are rows of encoded texts: see `text_kwargs`."""
        if (denoiser := parts.get("transformer")) is not None:
            parts.setdefault("unconditional_transformer", _NoGuidance(denoiser.dtype))
        made = super().pipeline(**parts)
        if parts.get("text_encoder") is None:
            made.encode_prompt = self._encoded_rows
        return made

    @override
    def rendered(self, parts: Mapping[str, Any], text: str) -> str:
        return user_turn(parts["tokenizer"], [{"type": "text", "text": text}])

    @override
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Caption], recipe: Mapping[str, Any]) -> Encoded:
        # Truncated here: the pipeline raises for a long text.
        encoder, tokenizer, length = parts["text_encoder"], parts["tokenizer"], recipe["max_length"]
        cutting: Any = partial(tokenizer, truncation=True, max_length=length)
        cutting.apply_chat_template = tokenizer.apply_chat_template
        # At least one row of padding: without a mask the last bits differ.
        length = min(length, _BLOCK * (max(text.num_tokens for text in texts) // _BLOCK + 1))
        pipeline = self.pipeline(text_encoder=encoder, tokenizer=cutting)
        embeds, _, _, roles = pipeline.encode_prompt([text.text for text in texts], 0, 0, length, encoder.device)
        return {"prompt_embeds": embeds, f"prompt_embeds{MASK}": roles != 0}  # 0 is padding

    @override
    def batch_statistics(self, vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `Family.batch_statistics`, in FLUX.2's order. ModelError for FLUX.2's own VAE, already in that order."""
        means, deviations = super().batch_statistics(vae)
        # A channel has nearly the same mean at all four places of a patch, which reveals the order.
        if means.view(4, -1).std(0).mean() > means.view(-1, 4).std(1).mean():
            met = "its statistics (bn) for scaling latents are those of FLUX.2, as in flux2-vae.safetensors"
            raise ModelError(f"vae: {met}. Set model.vae to null or to the model's own.", part="vae")
        return means.view(4, -1).T.flatten(), deviations.view(4, -1).T.flatten()

    def _encoded_rows(
        self, prompt: Sequence[torch.Tensor], grid_h: int, grid_w: int, max_sequence_length: int, device: Any
    ) -> tuple[torch.Tensor, ...]:
        """What the pipeline's `encode_prompt` returns, for already encoded texts [n, D]."""
        lengths, pad = [len(each) for each in prompt], torch.nn.functional.pad
        rows = [pad(each, (0, 0, max_sequence_length - len(each), grid_h * grid_w)) for each in prompt]
        ids = self.pipeline_class._prepare_ids(lengths, grid_h, grid_w, max_sequence_length, device)
        return torch.stack(rows), *ids

    @override
    def conditions(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        names = ("encoder_hidden_states", "position_ids", "segment_ids", "indicator")
        (rows, columns), given = noisy.shape[-2:], self.text_kwargs(batch)
        found = self._encoded_rows(given["prompt"], rows, columns, given["max_sequence_length"], noisy.device)
        return dict(zip(names, found, strict=True))

    @override
    def predict(
        self, denoiser: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Mapping[str, Any]
    ) -> torch.Tensor:
        """Like `Family.predict`. The model's time runs from noise (0) to image (1), so its velocity is negated."""
        conditions = self.conditions(denoiser, noisy, batch)
        tokens = noisy.unflatten(1, (-1, 4)).transpose(1, 2).flatten(1, 2).flatten(2).transpose(1, 2)
        length = conditions["indicator"].shape[1] - tokens.shape[1]
        given = torch.nn.functional.pad(tokens, (0, 0, length, 0))
        times = (1 - timesteps / 1000).to(given.dtype)  # which its embedding computes in
        made: torch.Tensor = denoiser(given, timestep=times, return_dict=False, **conditions)[0]
        return -_in_layout(made[:, length:], *noisy.shape[-2:])

    @override
    def text_kwargs(self, embeds: Mapping[str, Any]) -> dict[str, Any]:
        rows = unpadded(embeds)
        num_blocks = math.ceil(max(map(len, rows)) / _BLOCK)
        return {"prompt": rows, "max_sequence_length": num_blocks * _BLOCK}

    @override
    def guidance_kwargs(self, guidance_scale: float) -> dict[str, Any]:
        """Like `Family.guidance_kwargs`. ConfigError for guidance: the second transformer is not loaded."""
        if guidance_scale > 1:
            message = f"guidance_scale is {guidance_scale:g}, but that needs a second transformer; set it to 1.0"
            raise ConfigError(message, key="validation.guidance_scale")
        return {"guidance_scale": 1.0, "guidance_schedule": None}

    @override
    def final_latents(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        pixels = 2 * self.latent.downscale
        return _in_layout(latents, height // pixels, width // pixels)


def _in_layout(tokens: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Tokens [B, S, 4C] with channels ordered (row, column, channel) -> FLUX.2's layout [B, 4C, h, w]."""
    channels: torch.Tensor = tokens.unflatten(2, (4, -1)).transpose(2, 3).flatten(2)
    return channels.transpose(1, 2).reshape(len(tokens), -1, rows, columns)


FAMILY = Ideogram4()
