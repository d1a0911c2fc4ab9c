"""Krea 2, base and distilled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from latentcache.families.base import MASK, Caption, Encoded, LatentSpace, TextField
from latentcache.families.packed import PackedFamily
from latentcache.families.parts import LLM_SETTINGS, WAN_VAE, Part, TrainerFiles, layers_below
from latentcache.families.qwen_image import NUM_DROPPED, QwenImage, check_prefix, template
from latentcache.types import Padding

_LAYERS = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)
"""Indices of the hidden states to read, 0 being the embeddings: the pipeline's `text_encoder_select_layers`."""
_NUM_SUFFIX = 5
"""Template tokens after the text. The encoder reads them after the padding."""
_PREFIX, _SUFFIX = "prompt_template_encode_prefix", "prompt_template_encode_suffix"
"""Pipeline attributes with the template before and after a text."""


class Krea2(PackedFamily):
    """Twelve layers of Qwen3-VL per token, and the VAE of Qwen-Image. Guidance is off at 0.

    Entries have the rows of the text and the suffix, [n, 12, D]. Batches have the pipeline's layout, with zeros before
    the suffix up to `max_length` rows. Other padding changes the order of summation: differences of 8e-6.
    """

    name = "krea2"
    pipeline_name = "Krea2Pipeline"
    pipeline_settings = ("is_distilled",)
    pipeline_options = {"text_encoder_select_layers": _LAYERS}
    repositories = ("krea/Krea-2-Raw",)
    trainer_files = {
        "simpletuner": TrainerFiles("krea2"),
        "musubi": TrainerFiles("kr2", "krea2", is_scaled=True, texts={"varlen_krea2_vl_embed": "prompt_embeds"}),
    }
    parts = {
        "vae": QwenImage.parts["vae"],
        # A hidden state is the output of the layer before it. The last one, which is normalised, is not read.
        "text_encoder": Part(
            "text_encoder", "transformers.Qwen3VLModel", layers_below("language_model.", max(_LAYERS)), LLM_SETTINGS
        ),
        "tokenizer": Part("tokenizer", "transformers.Qwen2Tokenizer"),
    }
    denoiser_class = "diffusers.Krea2Transformer2DModel"
    latent = LatentSpace(16, is_video=True, published=WAN_VAE)
    fields = {"prompt_embeds": TextField("text_hidden_dim", Padding(512, num_last=_NUM_SUFFIX), (12, 2560))}
    max_length = 512
    recipe = {"layers": " ".join(map(str, _LAYERS)), "num_dropped": NUM_DROPPED}
    can_keep_padding = False
    no_guidance = 0.0

    @override
    def padding(self, field: str, recipe: Mapping[str, Any]) -> Padding:
        """To one length: the pipeline needs prompt and negative prompt to be equally long."""
        return Padding(recipe["max_length"], num_last=_NUM_SUFFIX)

    @override
    def rendered(self, parts: Mapping[str, Any], text: str) -> str:
        return f"{template(self, _PREFIX)}{text}{template(self, _SUFFIX)}"

    @override
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Caption], recipe: Mapping[str, Any]) -> Encoded:
        """Like `Family.encode_text`. ModelError as from `check_prefix`."""
        check_prefix(parts["tokenizer"], template(self, _PREFIX))
        # The pipeline passes positions that skip the padding: without them the rows of the suffix would differ.
        embeds, mask = self.pipeline_texts(
            parts, texts, recipe, {layer: f"language_model.layers.{layer - 1}" for layer in _LAYERS}
        )
        return {"prompt_embeds": embeds, f"prompt_embeds{MASK}": mask}

    @override
    def text_shapes(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        length, width = super().text_shapes(parts, recipe)["prompt_embeds"]
        return {"prompt_embeds": (length, len(_LAYERS), width)}

    @override
    def conditions(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        import diffusers

        embeds, sides = batch["prompt_embeds"], [side // 2 for side in noisy.shape[-2:]]
        return {
            "encoder_hidden_states": embeds,
            "encoder_attention_mask": batch[f"prompt_embeds{MASK}"],
            "position_ids": diffusers.Krea2Pipeline.prepare_position_ids(embeds.shape[1], *sides, noisy.device),
        }

    @override
    def text_kwargs(self, embeds: Mapping[str, Any]) -> dict[str, Any]:
        return {name: embeds[name] for name in ("prompt_embeds", f"prompt_embeds{MASK}")}


FAMILY = Krea2()
