"""Qwen-Image 2.1 as an editor: the text-to-image checkpoint, with texts read together with control images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from latentcache.errors import ModelError
from latentcache.families.base import MASK, Encoded, TextField, padded
from latentcache.families.packed import control_latents
from latentcache.families.qwen_image_21 import QwenImage21
from latentcache.families.qwen_image_edit import IMAGE_SETTINGS, EditTexts
from latentcache.types import Padding

_VISION_SETTINGS = (
    *("image_token_id", "vision_start_token_id", "vision_config.deepstack_visual_indexes", "vision_config.hidden_act"),
    *(f"vision_config.{name}" for name in ("num_heads", "patch_size", "spatial_merge_size", "temporal_patch_size")),
    "vision_config.rope_parameters.rope_theta",
)
_ENCODER = QwenImage21.parts["text_encoder"]


class QwenImage21Edit(EditTexts, QwenImage21):
    """Qwen3-VL reads the control images in their cached size, then the text. Their latents are tokens in the text.

    The denoiser puts them in place of the encoder's rows for each image, so these rows are not stored. `image_slots`
    has the number of rows before each image. A model folder is detected as text to image: set `model.family`.
    """

    name = "qwen-image-21-edit"
    blocks = "qwenimage21.modular_blocks_qwenimage21.QwenImage21ImageConditionedCoreDenoiseStep"
    parts = {
        **QwenImage21.parts,
        "text_encoder": replace(
            _ENCODER, weights=(*_ENCODER.weights, "model.visual."), settings=(*_ENCODER.settings, *_VISION_SETTINGS)
        ),
        "processor": replace(QwenImage21.parts["processor"], settings=IMAGE_SETTINGS),
    }
    fields = {**QwenImage21.fields, "image_slots": TextField(None, Padding(), (1,), has_rows=False)}
    recipe = {**QwenImage21.recipe, "control_size": "as cached", "image_slots_dtype": "int32"}

    @override
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Any], recipe: Mapping[str, Any]) -> Encoded:
        pipeline, device = self.text_pipeline(parts), parts["text_encoder"].device
        rows, places = list[torch.Tensor](), list[torch.Tensor]()
        for text in texts:
            embeds, _, [is_slot] = pipeline.encode_prompt([text.text], [*text.pictures] or None, device)
            rows.append(embeds[0, ~is_slot])
            places.append((~is_slot).cumsum(0)[is_slot & ~is_slot.roll(1)])  # no text starts with a slot
        return padded(rows) | padded(places, "image_slots")

    @override
    def text_shapes(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"prompt_embeds": (64, *super().text_shapes(parts, recipe)["prompt_embeds"][1:]), "image_slots": (1,)}

    @override
    def conditions(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Like `Family.conditions`. ModelError if the texts were read with a different number of images."""
        made, controls = super().conditions(denoiser, noisy, batch), control_latents(batch, noisy)
        embeds, is_slot = _with_slots(batch, controls)
        target = made["img_mask"][:, batch["prompt_embeds"].shape[1] :]
        shapes = [(1, *each.shape[-2:]) for each in (*controls, noisy)]
        return {
            "encoder_hidden_states": embeds,
            "img_shapes": [shapes] * len(noisy),
            "img_mask": torch.cat([is_slot, target], dim=1),
        }

    @override
    def text_kwargs(self, embeds: Mapping[str, Any]) -> dict[str, Any]:
        rows, is_slot = _with_slots(embeds, control_latents(embeds, embeds["control_latents_1"]))
        return {"prompt_embeds": rows, f"prompt_embeds{MASK}": torch.ones_like(is_slot), "image_pad_mask": is_slot}


def _with_slots(batch: Mapping[str, Any], controls: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The texts of a batch with a zero row for each token of its control images, and the mask of these rows.

    [B, L, D] and bool [B, L]. ModelError unless all texts have these images in the same places.
    """
    embeds, (places, *others) = batch["prompt_embeds"], batch["image_slots"].tolist()
    if any(each != places for each in others):
        met = f"texts of one batch have their images at different rows, e.g. {places}"
        raise ModelError(f"text_encoder: {met}. Use a batch size of 1.", part="text_encoder")
    if len(places) != len(controls):
        met = f"the texts were read with {len(places)} control images, but the batch has {len(controls)}"
        raise ModelError(f"text_encoder: {met}. Run `latentcache precache CONFIG` again.", part="text_encoder")
    rows = [*range(embeds.shape[1])]
    for place, control in reversed([*zip(places, controls, strict=True)]):
        rows[place:place] = [-1] * (control[0, 0].numel() // 4)
    is_slot = torch.tensor(rows, device=embeds.device) < 0
    return embeds[:, rows].masked_fill(is_slot[:, None], 0), is_slot.expand(len(embeds), -1)


FAMILY = QwenImage21Edit()
