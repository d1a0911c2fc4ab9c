"""SimpleTuner's files of other families than SDXL, as it writes them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from helpers.photo_files import write_photo

WIDTH = 8
"""Of a row, in place of the thousands of the published models."""
CAPTIONS = {"cat": "a cat", "dog": "a dog that sits"}


@dataclass(frozen=True)
class Case:
    """A family: SimpleTuner's word for its texts, and the form of its latents. `rows`: of a text with its padding."""

    model: str
    channels: int = 16
    frames: bool = False
    rows: int | None = None


CASES = {
    "sd15": Case("sd1x", channels=4, rows=77),
    "flux": Case("flux", rows=512),
    "chroma": Case("chroma"),
    "z-image": Case("z_image"),
    "qwen-image": Case("qwen_image"),
    "krea2": Case("krea2"),
    "wan": Case("wan", frames=True),
}


def latents_of(family: str, seed: int) -> torch.Tensor:
    """Scaled, for a bucket of 64 x 96 pixels: [C, h, w], of Wan with one frame."""
    case = CASES[family]
    shape = (case.channels, *([1] if case.frames else []), 8, 12)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def own_rows(family: str, seed: int) -> torch.Tensor:
    """The embeddings of a text without padding, or with it where the family attends to it: [L, (layers,) D]."""
    case = CASES[family]
    num_rows = case.rows or 5 + seed
    shape = (num_rows, *([12] if family == "krea2" else []), WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 40)).bfloat16()


def pooled_of(seed: int) -> torch.Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(seed + 80)).bfloat16()


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
        zeros = rows.new_zeros(512 - len(rows), WIDTH)
        return {"prompt_embeds": torch.cat([rows, zeros])[None], "attention_masks": torch.ones(1, 512, WIDTH)}
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
    """`folder`/images, a photo of 160 x 96 pixels for each caption, and its cache in `folder`/vae and `folder`/text."""
    for name in ("vae", "text"):
        (folder / name).mkdir()
    for seed, (stem, caption) in enumerate(CAPTIONS.items()):
        write_photo(folder / f"images/{stem}.png", seed, (96, 160)).with_suffix(".txt").write_text(caption)
        name = hashlib.sha256(stem.encode()).hexdigest()
        torch.save(latents_of(family, seed), folder / "vae" / f"{name}.pt")
        name = hashlib.md5(caption.encode()).hexdigest()
        torch.save(simpletuner_text(family, seed), folder / "text" / f"{name}-{CASES[family].model}.pt")
