"""A cache for the page, of photos and random latents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from helpers.photo_files import write_photo
from helpers.remote_samples import COMMON, make_entry

from latentcache.config import BucketsConfig
from latentcache.dataset.bucket_rules import BucketRule
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Ref, Row
from latentcache.identity import digest
from latentcache.store import DiskStore
from latentcache.types import Entry, Refusal, Size

LONG_CAPTION = " ".join(f"word{number}" for number in range(90))
_REFUSED = Refusal("broken.jpg", "/nowhere/broken.jpg", "truncated", "the JPEG data ends after 12,345 bytes")
_SIZES = (Size(192, 128), Size(128, 192), Size(130, 192))


def photo_cache(folder: Path, num_photos: int = 40) -> Manifest:
    """`folder/cache`: photos in two buckets, a refused file, a caption that is too long, and a validation set."""
    rule, rows, entries = BucketRule(BucketsConfig(area=256 * 256, step=64)), dict[str, Row](), list[Entry]()
    for number in range(num_photos):
        name, size = f"{number:03d}.png", _SIZES[number % 3]
        path = write_photo(folder / "photos" / name, number, size)
        captions = [LONG_CAPTION, "a street at night"] if number == 1 else [f"a red house, number {number}"]
        embeds = {"prompt_embeds": torch.ones(2, 4).half()}
        texts = [make_entry("text", text, embeds, num_tokens=len(text.split()) + 2) for text in captions]
        geometry = rule.geometry(size)
        assert geometry is not None
        side = geometry.target_size
        latents = {"moments": torch.randn(8, side.height // 8, side.width // 8).half()}
        image = make_entry("image", number, latents, created="2026-11-05T14:03:00+00:00")
        entries += [image, *texts]
        refs = tuple(Ref.of_text(text, entry.record.key) for text, entry in zip(captions, texts, strict=True))
        rows[name] = Row(name, str(path), digest(path.read_bytes()), (Ref(image.record.key, geometry),), refs)
    with DiskStore(folder / "cache") as store:
        store.add(entries)
    refused = Row("broken.jpg", _REFUSED.path, None, (), (), _REFUSED)
    manifest = Manifest("photos", "train", 1, COMMON, {**rows, "broken.jpg": refused})
    held_out = replace(manifest, name="held-out", role="validation", rows=dict(list(rows.items())[:2]))
    for each in (manifest, held_out):
        ManifestFolder(folder / "cache" / "manifests").write(each)
    return manifest
