"""Qwen-Image and finetunes of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from typing_extensions import override

from latentcache.errors import ModelError
from latentcache.families.base import MASK, Caption, Encoded, Family, LatentSpace, TextField
from latentcache.families.packed import PackedFamily
from latentcache.families.parts import LLM_SETTINGS, VAE_WEIGHTS, WAN_VAE, Part, TrainerFiles
from latentcache.types import Padding

_VAE_SETTINGS = (
    *("base_dim", "z_dim", "dim_mult", "num_res_blocks", "attn_scales", "temperal_downsample", "dropout"),
    "input_channels",
)
NUM_DROPPED = 34
"""Number of system prompt tokens, whose rows the pipeline drops."""
STATES = {-1: "language_model.norm"}
"""The hidden state that the pipeline reads, and the module that outputs it."""
PLACEHOLDER = re.compile(r"<\|(image|video)_pad\|>")
"""Image placeholders, removed from captions: a processor would fail for lack of the image."""


class QwenImage(PackedFamily):
    """The last layer of Qwen2.5-VL, after its norm, without the system prompt's rows; latents with one frame.

    The pipeline pads to the longest text, so a text's values depend on the rest of its batch, by 8e-7 on the CPU in
    float32. Texts are therefore encoded one by one on the CPU, and in batches on an accelerator.
    """

    name = "qwen-image"
    pipeline_name = "QwenImagePipeline"
    pipeline_names: ClassVar[tuple[str, ...]] = (
        *("QwenImageImg2ImgPipeline", "QwenImageInpaintPipeline", "QwenImageControlNet*"),
    )
    repositories: ClassVar[tuple[str, ...]] = ("Qwen/Qwen-Image",)
    parts = {
        "vae": Part("vae", "diffusers.AutoencoderKLQwenImage", VAE_WEIGHTS, _VAE_SETTINGS, "AutoencoderKLWan"),
        "text_encoder": Part(
            "text_encoder",
            "transformers.Qwen2_5_VLForConditionalGeneration",
            ("model.language_model.",),
            settings=LLM_SETTINGS,
        ),
        "tokenizer": Part("tokenizer", "transformers.Qwen2Tokenizer"),
    }
    denoiser_class = "diffusers.QwenImageTransformer2DModel"
    latent = LatentSpace(16, is_video=True, published=WAN_VAE)
    trainer_files = {
        "simpletuner": TrainerFiles("qwen_image"),
        "musubi": TrainerFiles("qi", "qwen_image", is_scaled=True, texts={"varlen_vl_embed": "prompt_embeds"}),
    }
    fields = {"prompt_embeds": TextField("joint_attention_dim", Padding(), (3584,))}
    max_length = 512
    longest: ClassVar[int | None] = 1024
    recipe = {"layers": "-1", "num_dropped": NUM_DROPPED}
    can_keep_padding = False
    guidance_name = "true_cfg_scale"

    @override
    def rendered(self, parts: Mapping[str, Any], text: str) -> str:
        return template(self).format(text)

    @override
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Caption], recipe: Mapping[str, Any]) -> Encoded:
        """Like `Family.encode_text`. ModelError as from `check_prefix`."""
        check_prefix(parts["tokenizer"], template(self).partition("{}")[0])
        embeds, mask = self.pipeline_texts(parts, texts, recipe, STATES)
        mask = torch.ones(embeds.shape[:2], device=embeds.device) if mask is None else mask
        return {"prompt_embeds": embeds, f"prompt_embeds{MASK}": mask.bool()}

    @override
    def conditions(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        shape = (1, noisy.shape[-2] // 2, noisy.shape[-1] // 2)
        return {
            "guidance": None,
            "encoder_hidden_states": batch["prompt_embeds"],
            "encoder_hidden_states_mask": needed_mask(batch),
            "img_shapes": [[shape]] * len(noisy),
        }

    @override
    def text_kwargs(self, embeds: Mapping[str, Any]) -> dict[str, Any]:
        return super().text_kwargs(embeds) | {f"prompt_embeds{MASK}": needed_mask(embeds)}


@cache
def template(family: Family, name: str = "prompt_template_encode") -> str:
    """A chat template, or part of one, of the family's pipeline; `{}` stands for the text."""
    return str(getattr(family.pipeline(), name))


def needed_mask(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """The mask of the batch's texts [B, L]; None if nothing is padding, as in the pipeline."""
    mask: torch.Tensor | None = batch.get(f"prompt_embeds{MASK}")
    return None if mask is None or bool(mask.all()) else mask


def check_prefix(tokenizer: Any, prefix: str, num_dropped: int = NUM_DROPPED) -> None:
    """ModelError unless the system prompt has `num_dropped` tokens: others would pass for rows of the text."""
    found = len(tokenizer(prefix).input_ids)
    if found != num_dropped:
        raise ModelError(
            f"tokenizer: it splits the system prompt into {found} tokens, but the pipeline drops {num_dropped}. Use "
            "the model's own tokenizer.",
            part="tokenizer",
        )


FAMILY = QwenImage()
