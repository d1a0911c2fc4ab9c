"""A foreign cache in memory, for tests that apply to every format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from latentcache.dataset.bucket_rules import fit
from latentcache.families import family_named
from latentcache.interop.importing import import_cache
from latentcache.interop.readers import ForeignCache, ForeignImage, ForeignItem, ForeignText
from latentcache.interop.reports import ImportReport
from latentcache.loading.cache import LatentCache
from latentcache.precache.workspace import Workspace
from latentcache.types import Refusal, Size

BUCKET = Size(64, 128)
STD = 7.7


@dataclass
class Foreign:
    """A foreign cache with these items."""

    contents: Sequence[ForeignItem]
    format: str = "test"
    family: str = "sdxl"

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
) -> ForeignImage:
    """Latents of an image of 80 x 160 pixels, seeded by the sample_id."""
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
    )


def text(
    *sample_ids: str, caption: str | None = "a caption", dtype: torch.dtype = torch.float32, width: int = 72
) -> ForeignText:
    """Embeddings seeded by the caption."""
    generator = torch.Generator().manual_seed(len(caption or ""))
    return ForeignText(
        sample_ids=sample_ids,
        path=f"/foreign/{caption}.text",
        caption=caption,
        prompt_embeds=torch.randn(77, width, generator=generator).to(dtype),
        pooled_prompt_embeds=torch.randn(40, generator=generator).to(dtype),
    )


def pairs(*sample_ids: str) -> list[ForeignItem]:
    """Latents and a caption for each of these samples."""
    return [item for each in sample_ids for item in (image(each), text(each, caption=f"of {each}"))]


def imported(foreign: ForeignCache, name: str = "foreign", **options: Any) -> tuple[LatentCache, ImportReport]:
    """Import into a cache in memory, as the manifest `name`. Returns the cache and the report."""
    workspace = Workspace()
    report = import_cache(foreign, workspace, name=name, **options)
    return LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True), report


def of_family(family: str, *sample_ids: str) -> list[ForeignItem]:
    """Small scaled latents and a caption per sample, for a family other than the default."""
    declared, found = family_named(family), list[ForeignItem]()
    for seed, name in enumerate(sample_ids):
        generator = torch.Generator().manual_seed(seed)
        frames = [1] if declared.latent.is_video else []
        latents = torch.randn(declared.latent.channels, *frames, 8, 16, generator=generator).bfloat16()
        found.append(ForeignImage(name, f"{name}.bin", None, latents, True, "mean", fit(Size(80, 160), BUCKET)))
        features = (3, 8) if family == "krea2" else (8,)
        embeds = torch.randn(5 if family == "flux" else 5 + seed, *features, generator=generator).bfloat16()
        pooled = torch.randn(4, generator=generator).bfloat16() if "pooled_prompt_embeds" in declared.fields else None
        found.append(ForeignText((name,), f"{name}.text", f"of {name}", embeds, pooled))
    return found


def split(cache: ForeignCache) -> tuple[list[ForeignImage], list[ForeignText], list[Refusal]]:
    """Return the items of a cache by type."""
    items: list[ForeignItem] = list(cache.items())
    return (
        [item for item in items if isinstance(item, ForeignImage)],
        [item for item in items if isinstance(item, ForeignText)],
        [item for item in items if isinstance(item, Refusal)],
    )
