"""Qwen-Image-Edit 2509 and 2511, whose text encoder reads each caption together with its control images."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from typing_extensions import override

from latentcache.families.base import MASK, Caption, Encoded, Family, padded
from latentcache.families.hidden_states import HiddenStates
from latentcache.families.modular import modular_sampler
from latentcache.families.packed import control_latents
from latentcache.families.parts import LLM_SETTINGS, Part
from latentcache.families.qwen_image import PLACEHOLDER, STATES, QwenImage, check_prefix

_NUM_DROPPED = 64
"""Number of system prompt tokens, whose rows the pipeline drops."""
_AREA = 384 * 384
"""Approximate pixels of a control image for the text encoder: the pipeline's `CONDITION_IMAGE_SIZE`."""
_VISION_SETTINGS = (
    *("image_token_id", "vision_start_token_id"),
    *(f"vision_config.{name}" for name in ("fullatt_block_indexes", "hidden_act", "num_heads", "patch_size")),
    *(f"vision_config.{name}" for name in ("spatial_merge_size", "temporal_patch_size", "tokens_per_second")),
    *("vision_config.window_size", "vision_config.rope_parameters.rope_theta"),
)
IMAGE_SETTINGS = (
    *("size", "do_convert_rgb", "do_resize", "resample", "do_rescale", "rescale_factor", "do_normalize", "patch_size"),
    *("temporal_patch_size", "merge_size", "image_mean", "image_std"),
)


@dataclass(frozen=True, slots=True)
class EditCaption(Caption):
    """A caption with its control images, as the pipeline passes them to the processor."""

    pictures: Sequence[Any]


class EditTexts(Family):
    """A family whose text encoder and denoiser both read control images."""

    reads_controls, text_reads_control, uncut_texts = True, True, True
    blocks: ClassVar[str]
    """The denoising blocks, in `diffusers.modular_pipelines`."""

    def picture(self, pixels: Any) -> Any:
        """A control image, uint8 [H, W, 3], as the pipeline passes it to the processor."""
        return pixels

    @override
    def tokenize(self, parts: Mapping[str, Any], texts: Sequence[str]) -> Sequence[EditCaption]:
        return self.tokenize_with_control(parts, texts, [()] * len(texts))

    @override
    def tokenize_with_control(
        self, parts: Mapping[str, Any], texts: Sequence[str], images: Sequence[Sequence[Any]]
    ) -> Sequence[EditCaption]:
        """Like `Family.tokenize_with_control`. `num_tokens` counts only the text."""
        return [
            EditCaption(PLACEHOLDER.sub("", text.text), text.num_tokens, [*map(self.picture, group)])
            for text, group in zip(super().tokenize(parts, texts), images, strict=True)
        ]

    @override
    def sampler(self, **parts: Any) -> Any:
        """Modular blocks of diffusers: its pipelines take no embeddings without the pixels of the images."""
        module, _, name = self.blocks.rpartition(".")
        blocks: Any = getattr(importlib.import_module(f"diffusers.modular_pipelines.{module}"), name)
        return modular_sampler(blocks(), self.guidance_name, **parts)

    @override
    def pipeline_kwargs(self, embeds: Mapping[str, Any], negative: Mapping[str, Any] | None) -> dict[str, Any]:
        """Like `Family.pipeline_kwargs`, of texts that come with their control latents."""
        images = control_latents(embeds, embeds["control_latents_1"])
        return {**super().pipeline_kwargs(embeds, negative), "image_latents": images}

    @override
    def final_latents(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Unchanged: the blocks unpack them."""
        return latents


class QwenImageEdit(EditTexts, QwenImage):
    """Qwen2.5-VL reads each control image at about 384x384 pixels, then the text. Latents are Qwen-Image's.

    Control latents are further tokens of the denoiser. Texts are read one by one, as in the pipeline, and never
    truncated. The first Qwen-Image-Edit has a different template and is refused. The processor needs torchvision.
    `image_positions` says how the installed diffusers numbers an image's tokens: like `text` (a bug in 0.42.1 with
    transformers 5), or by `rows and columns`, as in the model's training.
    """

    name = "qwen-image-edit"
    pipeline_name = "QwenImageEditPlusPipeline"
    pipeline_names = ()
    blocks = "qwenimage.modular_blocks_qwenimage_edit_plus.QwenImageEditPlusCoreDenoiseStep"
    refused_pipelines = {"QwenImageEditPipeline": "is the first Qwen-Image-Edit, which has a different template"}
    repositories = ("Qwen/Qwen-Image-Edit-2511", "Qwen/Qwen-Image-Edit-2509")
    parts = {
        "vae": QwenImage.parts["vae"],
        "text_encoder": replace(
            QwenImage.parts["text_encoder"],
            weights=("model.language_model.", "model.visual."),
            settings=(*LLM_SETTINGS, *_VISION_SETTINGS),
        ),
        "processor": Part("tokenizer", "transformers.Qwen2VLProcessor", settings=IMAGE_SETTINGS, needs="torchvision"),
    }
    longest = None
    recipe = {"layers": "-1", "num_dropped": _NUM_DROPPED, "control_area": _AREA, "control_resample": "lanczos"}

    @override
    def text_recipe(self, *, negative: bool = False, **settings: Any) -> dict[str, Any]:
        return {**super().text_recipe(negative=negative, **settings), "image_positions": _image_positions()}

    @override
    def rendered(self, parts: Mapping[str, Any], text: str) -> str:
        """Without the words for the control images, which depend only on their number."""
        return super().rendered(parts, PLACEHOLDER.sub("", text))

    @override
    def picture(self, pixels: Any) -> Any:
        """Resized to about _AREA pixels."""
        from diffusers.image_processor import VaeImageProcessor

        width, height = _pipeline_module().calculate_dimensions(_AREA, pixels.shape[1] / pixels.shape[0])
        [picture] = VaeImageProcessor.numpy_to_pil(pixels / 255)
        return VaeImageProcessor(resample="lanczos").resize(picture, height, width)

    @override
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Any], recipe: Mapping[str, Any]) -> Encoded:
        """Like `Family.encode_text`. ModelError as from `check_prefix`."""
        encoder, processor = parts["text_encoder"], parts["processor"]
        check_prefix(processor.tokenizer, self.rendered(parts, "{}").partition("{}")[0], _NUM_DROPPED)
        pipeline = self.pipeline(text_encoder=HiddenStates(encoder, STATES), processor=processor)
        made = [pipeline.encode_prompt([each.text], [*each.pictures] or None, encoder.device)[0][0] for each in texts]
        return padded(made)

    @override
    def text_shapes(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        reader, side = parts["processor"].image_processor, int(recipe["control_area"] ** 0.5)
        num_rows = 64 + reader.get_number_of_image_patches(side, side, {}) // reader.merge_size**2
        return {"prompt_embeds": (num_rows, parts["text_encoder"].config.text_config.hidden_size)}

    @override
    def conditions(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        images = [noisy, *control_latents(batch, noisy)]
        shapes = [(1, each.shape[-2] // 2, each.shape[-1] // 2) for each in images]
        return {**super().conditions(denoiser, noisy, batch), "img_shapes": [shapes] * len(noisy)}

    @override
    def text_kwargs(self, embeds: Mapping[str, Any]) -> dict[str, Any]:
        return {name: embeds[name] for name in ("prompt_embeds", f"prompt_embeds{MASK}")}


def _pipeline_module() -> Any:
    return importlib.import_module("diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus")


@cache
def _image_positions() -> str:
    """How the encoder numbers image tokens: transformers 5 needs to be told which they are (diffusers #14194)."""
    return "rows and columns" if "mm_token_type_ids" in inspect.getsource(_pipeline_module()) else "text"


FAMILY = QwenImageEdit()
