"""Chroma, whose denoiser masks all but one row of T5's padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from latentcache.families.base import Caption, Encoded, LatentSpace, TextField
from latentcache.families.packed import PackedFamily, image_ids, text_ids
from latentcache.families.parts import FLUX_VAE, KL_VAE, T5_SETTINGS, Part, TrainerFiles
from latentcache.types import Padding

_MASK = "prompt_attention_mask"


class Chroma(PackedFamily):
    """T5's rows of a text and one row of padding, with a mask.

    In diffusers 0.42.1 the pipeline's mask holds floating-point 0 and 1, which attention adds, so it masks nothing and
    all rows count. `padding: keep` stores all rows and that mask, which reproduces the pipeline's images. Without
    padding the mask is bool and does mask, as in training, which gives different images. The recipe says which.
    """

    name = "chroma"
    pipeline_name = "ChromaPipeline"
    pipeline_names = ("ChromaImg2ImgPipeline", "ChromaInpaintPipeline")
    repositories = ("lodestones/Chroma1-HD", "lodestones/Chroma1-Base")
    trainer_files = {"simpletuner": TrainerFiles("chroma")}
    parts = {
        "vae": KL_VAE,
        "text_encoder": Part("text_encoder", "transformers.T5EncoderModel", settings=T5_SETTINGS),
        "tokenizer": Part("tokenizer", "transformers.T5TokenizerFast"),
    }
    denoiser_class = "diffusers.ChromaTransformer2DModel"
    latent = LatentSpace(16, published=FLUX_VAE)
    fields = {"prompt_embeds": TextField("joint_attention_dim", Padding(), (4096,))}
    max_length = 512

    @override
    def padding(self, field: str, recipe: Mapping[str, Any]) -> Padding | None:
        """To the pipeline's own length: with fewer rows the last bits differ."""
        return None if recipe.get("keeps_padding", True) else Padding(recipe["max_length"])

    @override
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Caption], recipe: Mapping[str, Any]) -> Encoded:
        embeds, _, mask, *_ = self.pipeline_texts(parts, texts, recipe, do_classifier_free_guidance=False)
        if recipe["keeps_padding"]:
            return {"prompt_embeds": embeds, _MASK: mask}
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask.bool()}

    @override
    def text_shapes(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        mask = {_MASK: (recipe["max_length"],)} if recipe["keeps_padding"] else {}
        return super().text_shapes(parts, recipe) | mask

    @override
    def conditions(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        image, embeds = image_ids(noisy), batch["prompt_embeds"]
        is_image = torch.ones(len(embeds), len(image), dtype=torch.bool, device=embeds.device)
        return {
            "encoder_hidden_states": embeds,
            "attention_mask": torch.cat([_mask(batch), is_image], dim=1),
            "txt_ids": text_ids(embeds),
            "img_ids": image,
        }

    @override
    def text_kwargs(self, embeds: Mapping[str, Any]) -> dict[str, Any]:
        return super().text_kwargs(embeds) | {_MASK: _mask(embeds)}


def _mask(batch: Mapping[str, Any]) -> torch.Tensor:
    """The mask [B, L]: the pipeline's own if it is stored, else the bool one."""
    found: torch.Tensor = batch[_MASK] if _MASK in batch else batch["prompt_embeds_mask"]
    return found


FAMILY = Chroma()
