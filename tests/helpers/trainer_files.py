"""Files of ai-toolkit and SimpleTuner for other families than SDXL, as the trainers write them."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers.photo_files import write_photo
from safetensors.torch import save_file

WIDTH = 8
"""Of a row, in place of the thousands of the published models."""
CAPTIONS = {"cat": "a cat", "dog": "a dog that sits"}


@dataclass(frozen=True)
class Case:
    """A family: ai-toolkit's word for its latents, SimpleTuner's for its texts, and the forms of both.

    `rows`: of a text as files of ai-toolkit have it; None is its own number.
    """

    space: str
    model: str
    rows: int | None
    channels: int = 16
    frames: bool = False


CASES = {
    "sd15": Case("sd1", "sd1x", 77, channels=4),
    "flux": Case("flux1", "flux", 512),
    "chroma": Case("chroma", "chroma", 512),
    "z-image": Case("zimage", "z_image", None),
    "qwen-image": Case("qwen_image", "qwen_image", None),
    "krea2": Case("krea2", "krea2", None),
    "wan": Case("wan22_14b", "wan", 512, frames=True),
}
HAS_POOLED = ("sdxl", "flux")


def latents_of(family: str, seed: int) -> torch.Tensor:
    """Scaled, for a bucket of 64 x 96 pixels: [C, h, w], of Wan with one frame."""
    case = CASES[family]
    shape = (case.channels, *([1] if case.frames else []), 8, 12)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def own_rows(family: str, seed: int) -> torch.Tensor:
    """The embeddings of a text without padding, or with it where the family attends to it: [L, (layers,) D]."""
    case = CASES[family]
    num_rows = case.rows if family in ("sd15", "flux") else 5 + seed
    shape = (num_rows, *([12] if family == "krea2" else []), WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 40)).bfloat16()


def pooled_of(seed: int) -> torch.Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(seed + 80)).bfloat16()


def zero_padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])


def write_images(folder: Path) -> None:
    """A photo of 160 x 96 pixels for each caption, and the caption's file."""
    for seed, (stem, caption) in enumerate(CAPTIONS.items()):
        write_photo(folder / f"{stem}.png", seed, (96, 160)).with_suffix(".txt").write_text(caption)


def ai_toolkit_name(stem: str, facts: dict[str, Any]) -> str:
    document = json.dumps(facts, sort_keys=True).encode()
    code = base64.urlsafe_b64encode(hashlib.md5(document).digest()).decode().rstrip("=")
    return f"{stem}_{code}.safetensors"


def write_ai_toolkit(folder: Path, family: str, space: str | None = None) -> None:
    """Latents and texts in the folders next to the images."""
    space = space or CASES[family].space
    for seed, (stem, caption) in enumerate(CAPTIONS.items()):
        write_ai_toolkit_latent(folder, stem, space, latents_of(family, seed))
        tensors, metadata = ai_toolkit_text(family, seed)
        text_space = {"flux1": "flux"}.get(space, space)
        write_ai_toolkit_text(folder, stem, caption, text_space, tensors, metadata)


def write_ai_toolkit_latent(folder: Path, stem: str, space: str, latents: torch.Tensor) -> None:
    sizes = {"scale_to_width": 107, "scale_to_height": 64, "crop_x": 5, "crop_y": 0, "crop_width": 96}
    facts = {"filename": f"{stem}.png", **sizes, "crop_height": 64, "latent_space_version": space, "latent_version": 1}
    metadata = {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
    path = folder / "_latent_cache" / ai_toolkit_name(stem, facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"latent": latents}, path, metadata={**metadata, "format": "pt"})


def ai_toolkit_text(family: str, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, str] | None]:
    """Tensors and metadata of a text's file."""
    rows = own_rows(family, seed)
    if family == "z-image":
        return {"text_embed_0": rows}, None
    if family == "krea2":
        return {"text_embeds": rows.flatten(1)}, {"class_name": "AdvancedPromptEmbeds"}
    if family == "qwen-image":
        return {"text_embed": rows[None], "attention_mask": torch.ones(1, len(rows), dtype=torch.int64)}, None
    padded = zero_padded(rows, CASES[family].rows or len(rows))
    pooled = {"pooled_embed": pooled_of(seed)[None]} if family in HAS_POOLED else {}
    return {"text_embed": padded[None], **pooled}, None


def write_ai_toolkit_text(
    folder: Path,
    stem: str,
    caption: str,
    space: str,
    tensors: dict[str, torch.Tensor],
    metadata: dict[str, str] | None = None,
) -> Path:
    facts = {"caption": caption, "text_embedding_space_version": space, "text_embedding_version": 1}
    path = folder / "_t_e_cache" / ai_toolkit_name(stem, facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata=metadata)
    return path


def simpletuner_text(family: str, seed: int) -> dict[str, torch.Tensor]:
    """The payload of a text: masks leave other rows out than zeros."""
    rows = own_rows(family, seed)
    if family == "sd15":
        return {"prompt_embeds": rows[None]}
    if family == "flux":
        masks = (torch.arange(512) < 9).long()[None]
        return {
            "prompt_embeds": rows[None],
            "pooled_prompt_embeds": pooled_of(seed),
            "time_ids": torch.zeros(512, 3),
            "attention_masks": masks,
        }
    if family == "wan":  # its mask is no mask
        return {"prompt_embeds": zero_padded(rows, 512)[None], "attention_masks": torch.ones(1, 512, WIDTH)}
    # T5 and LLMs give numbers for padding too. Krea 2's lies before the last five rows.
    length = {"qwen-image": len(rows) + 3}.get(family, 512)
    generator = torch.Generator().manual_seed(seed)
    padding = torch.randn(length - len(rows), *rows.shape[1:], generator=generator).bfloat16()
    last = 5 if family == "krea2" else 0
    first = len(rows) - last
    mask = torch.cat([torch.ones(first), torch.zeros(len(padding)), torch.ones(last)])[None]
    dtype = {"qwen-image": torch.int64, "chroma": torch.bfloat16}.get(family, torch.bool)
    embeds = torch.cat([rows[:first], padding, rows[first:]])[None]
    return {"prompt_embeds": embeds, "attention_mask" if family == "z-image" else "attention_masks": mask.to(dtype)}


def write_simpletuner(folder: Path, family: str) -> None:
    """`folder`/vae and `folder`/text."""
    for name in ("vae", "text"):
        (folder / name).mkdir(parents=True)
    for seed, (stem, caption) in enumerate(CAPTIONS.items()):
        name = hashlib.sha256(stem.encode()).hexdigest()
        torch.save(latents_of(family, seed), folder / "vae" / f"{name}.pt")
        name = hashlib.md5(caption.encode()).hexdigest()
        torch.save(simpletuner_text(family, seed), folder / "text" / f"{name}-{CASES[family].model}.pt")
