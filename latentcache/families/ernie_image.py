"""ERNIE-Image: the base model and the distilled one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from latentcache.families.base import MASK, Caption, Encoded, Family, LatentSpace, TextField, padded, unpadded
from latentcache.families.flux2 import Flux2
from latentcache.families.hidden_states import HiddenStates
from latentcache.families.parts import LLM_SETTINGS, Part
from latentcache.types import Padding

_EPSILON = 1e-5
"""What its pipeline adds to variances. The VAE's config states a different value."""


class ErnieImage(Family):
    """The penultimate layer of Ministral 3 for the plain text, and the VAE of FLUX.2.

    Its pipeline does not truncate and can rewrite prompts with an LLM; here texts are truncated, and never rewritten.
    """

    name = "ernie-image"
    pipeline_name = "ErnieImagePipeline"
    repositories = ("baidu/ERNIE-Image",)
    parts = {
        "vae": Flux2.parts["vae"],
        "text_encoder": Part("text_encoder", "transformers.Mistral3Model", ("language_model.",), settings=LLM_SETTINGS),
        "tokenizer": Part("tokenizer", "transformers.AutoTokenizer"),
    }
    denoiser_class = "diffusers.ErnieImageTransformer2DModel"
    latent, patch = LatentSpace(32, draws=False), 2
    fields = {"prompt_embeds": TextField("text_in_dim", Padding(), (3072,))}
    max_length = 512
    recipe = {"layers": "-2"}
    can_keep_padding = False  # its pipeline does not pad
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "gate_proj", "up_proj", "linear_fc2")

    @override
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Caption], recipe: Mapping[str, Any]) -> Encoded:
        encoder, tokenizer = parts["text_encoder"], partial(parts["tokenizer"], max_length=recipe["max_length"])
        tokenizer.bos_token_id = parts["tokenizer"].bos_token_id  # type: ignore[attr-defined]  # used for an empty text
        layer = encoder.config.text_config.num_hidden_layers - 2
        states = HiddenStates(encoder, {-2: f"language_model.layers.{layer}"})
        pipeline = self.pipeline(text_encoder=states, tokenizer=tokenizer)
        return padded(pipeline.encode_prompt([text.text for text in texts], encoder.device))

    @override
    def batch_statistics(self, vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return vae.bn.running_mean, torch.sqrt(vae.bn.running_var + _EPSILON)

    @override
    def conditions(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {"text_bth": batch["prompt_embeds"], "text_lens": batch[f"prompt_embeds{MASK}"].sum(1)}

    @override
    def text_kwargs(self, embeds: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds": unpadded(embeds)}


FAMILY = ErnieImage()
