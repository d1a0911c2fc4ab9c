"""A foreign cache in memory, for what is done with any format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from latentcache.dataset.buckets import fit
from latentcache.interop.declaration import Declaration
from latentcache.interop.readers import ForeignImage, ForeignItem, ForeignText
from latentcache.types import Size

BUCKET = Size(64, 128)
STD = 7.7
FACTOR = 0.13025


@dataclass
class Foreign:
    """A foreign cache of these items."""

    contents: Sequence[ForeignItem]
    format: str = "test"
    family: str = "sdxl"
    keeps_padding: bool = True
    declaration: Declaration | None = None

    def items(self) -> Iterator[ForeignItem]:
        yield from self.contents


def image(
    sample_id: str,
    *,
    latents: torch.Tensor | None = None,
    is_scaled: bool = False,
    flip: bool = False,
    image_path: Path | None = None,
    std: float = STD,
    note: str | None = None,
) -> ForeignImage:
    """A latent of an image of 80 x 160 pixels; its values follow from the sample_id."""
    if latents is None:
        seed = sum(map(ord, sample_id)) + flip
        latents = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(seed)) * std
    return ForeignImage(
        sample_id=sample_id,
        path=f"/foreign/{sample_id}.bin",
        image_path=image_path,
        latents=latents,
        is_scaled=is_scaled,
        output="sample",
        geometry=fit(Size(80, 160), BUCKET, flip=flip),
        note=note,
    )


def text(
    *sample_ids: str, caption: str | None = "a caption", dtype: torch.dtype = torch.float32, width: int = 72
) -> ForeignText:
    """Embeddings that follow from the caption."""
    generator = torch.Generator().manual_seed(len(caption or ""))
    return ForeignText(
        sample_ids=sample_ids,
        path=f"/foreign/{caption}.text",
        caption=caption,
        prompt_embeds=torch.randn(77, width, generator=generator).to(dtype),
        pooled_prompt_embeds=torch.randn(40, generator=generator).to(dtype),
    )


def pairs(*sample_ids: str) -> list[ForeignItem]:
    """A latent and a caption for each of these samples."""
    return [item for each in sample_ids for item in (image(each), text(each, caption=f"of {each}"))]
