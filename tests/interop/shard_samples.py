"""A small cache in memory with all that shards can hold, and what an import of shards gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from foreign_samples import Foreign, image, text

from latentcache.interop.importing import import_cache
from latentcache.interop.readers import ForeignCache, ForeignItem
from latentcache.interop.reports import ImportReport
from latentcache.loading.cache import LatentCache
from latentcache.precache.workspace import Workspace
from latentcache.types import Entry

DECLARATION: dict[str, Any] = {
    "vae": "stabilityai/sdxl-vae",
    "scaled": True,
    "scaling_factor": 0.13025,
    "output": "sample",
    "preparation": "resized to cover the bucket, cropped in the middle",
}


def items(dtype: torch.dtype = torch.float32) -> list[ForeignItem]:
    """Three samples, of which one is flipped too, one has two captions, and one an odd name."""
    found: list[ForeignItem] = []
    for name in ("a.png", "sub/b.c.png", "ünï.png"):
        for flip in (False, True) if name == "a.png" else (False,):
            latents = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(len(name) + flip)) * 7.7
            found.append(image(name, latents=latents.to(dtype), flip=flip))
        captions = ("a cat", 'a cät, "sitting"\nor not') if name == "a.png" else (f"of {name}",)
        found += [text(name, caption=caption, dtype=dtype) for caption in captions]
    return found


def cache_of(contents: list[ForeignItem]) -> LatentCache:
    """A cache in memory, whose manifest is `foreign`."""
    workspace = Workspace()
    report = import_cache(Foreign(contents), workspace, name="foreign")
    assert not report.refused
    return LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True)


def reimported(foreign: ForeignCache, **options: Any) -> tuple[LatentCache, ImportReport]:
    """What an import gives, as a cache in memory whose manifest is `foreign`."""
    workspace = Workspace()
    report = import_cache(foreign, workspace, name="foreign", **options)
    return LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True), report


def entries(cache: LatentCache) -> dict[tuple[str, object], tuple[object, dict[str, torch.Tensor]]]:
    """(sample, flip or caption) -> geometry and tensors."""
    found: dict[tuple[str, object], tuple[object, dict[str, torch.Tensor]]] = {}
    for row in cache.manifest("foreign").rows.values():
        for ref in row.images:
            found[row.sample_id, ref.geometry.flip] = (ref.geometry, dict(cache.get(ref.key).tensors))
        for caption in row.captions:
            found[row.sample_id, caption.text] = (None, dict(cache.get(caption.key).tensors))
    return found


def assert_equal(found: LatentCache, expected: LatentCache) -> None:
    """The same samples, geometry and captions, and the same tensors to the last bit."""
    left, right = entries(found), entries(expected)
    assert left.keys() == right.keys()
    for name, (geometry, tensors) in left.items():
        assert geometry == right[name][0] and tensors.keys() == right[name][1].keys()
        for field, tensor in tensors.items():
            other = right[name][1][field]
            assert tensor.dtype == other.dtype and torch.equal(tensor, other), (name, field)


def any_entry(cache: LatentCache) -> Entry:
    row = next(iter(cache.manifest("foreign").rows.values()))
    return cache.get(row.images[0].key)


def declared(folder: Path, **changes: Any) -> Path:
    """A declaration's file."""
    file = folder.parent / f"{folder.name}.yaml"
    file.write_text(
        yaml.safe_dump({name: value for name, value in (DECLARATION | changes).items() if value is not None})
    )
    return file
