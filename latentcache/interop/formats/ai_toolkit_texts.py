"""The tensors of a caption in ai-toolkit's `_t_e_cache`, for each family.

`text_embed` [1, L, D]. With it are `pooled_embed` [1, P] of SDXL and FLUX.1, and `attention_mask` [1, L] of Qwen-Image.
Z-Image: `text_embed_0` [L, D]. Krea 2: `text_embeds` [L, layers * D], and the metadata name a class. Texts of Wan are
padded with zeros, those of FLUX.1 with T5's padding, others are of natural length. (Read in ai-toolkit 27a03a9.)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from latentcache.errors import ForeignFileRefused
from latentcache.families.base import Family
from latentcache.interop.exporting import ExportCaption
from latentcache.interop.family_tensors import caption_rows
from latentcache.interop.foreign_files import corrupt, tensor_in
from latentcache.interop.foreign_safetensors import safetensors_bytes

WHY_NOT = {"chroma": "ai-toolkit's T5 attends to the padding of Chroma's texts, and that of diffusers does not"}
"""The families whose texts ai-toolkit makes by another recipe than diffusers, and why."""
_NAMES = {"z-image": "text_embed_0", "krea2": "text_embeds"}
_MASKED = ("qwen-image",)


def read_text(
    family: Family, tensors: Mapping[str, torch.Tensor], path: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The caption's prompt_embeds [L, ...] and pooled_prompt_embeds [P]. Raises ForeignFileRefused."""
    if family.name in WHY_NOT:
        raise ForeignFileRefused(path, "unsupported-format", f"{WHY_NOT[family.name]}: precache texts")
    name = _NAMES.get(family.name, "text_embed")
    embeds = tensor_in(tensors.get(name), name, path, ndim=2 if family.name in _NAMES else 3)
    embeds = embeds[None] if family.name in _NAMES else embeds
    if family.name == "krea2":
        num_layers = family.fields["prompt_embeds"].features[0]
        if embeds.shape[-1] % num_layers:
            raise corrupt(path, f"{name} has {embeds.shape[-1]} features, which are not of {num_layers} layers")
        embeds = embeds.reshape(*embeds.shape[:-1], num_layers, -1)
    rows = caption_rows(family, embeds, tensors.get("attention_mask") if family.name in _MASKED else None, path)
    if "pooled_prompt_embeds" not in family.fields:
        return rows, None
    pooled = tensor_in(tensors.get("pooled_embed"), "pooled_embed", path, ndim=2)
    if len(pooled) != 1:
        raise corrupt(path, f"it holds {len(pooled)} captions; one is expected")
    return rows, pooled[0]


def text_bytes(family: Family, caption: ExportCaption) -> bytes:
    """The file of a caption, of a family that is not in WHY_NOT."""
    rows = caption.prompt_embeds
    if family.name == "wan":
        rows = torch.nn.functional.pad(rows, (0, 0, 0, family.max_length - len(rows)))
    tensors = {_NAMES.get(family.name, "text_embed"): rows.flatten(1) if family.name in _NAMES else rows[None]}
    if caption.pooled_prompt_embeds is not None:
        tensors["pooled_embed"] = caption.pooled_prompt_embeds[None]
    if family.name in _MASKED:
        tensors["attention_mask"] = torch.ones(1, len(rows), dtype=torch.int64)
    return safetensors_bytes(tensors, {"class_name": "AdvancedPromptEmbeds"} if family.name == "krea2" else None)
