"""A small cache to serve: images in two buckets and captions, of random values."""

from __future__ import annotations

from pathlib import Path

import torch

from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Ref, Row
from latentcache.identity import key_of
from latentcache.remote.transport import ANY_VERSION, REMOVALS, Transport, packs_in, removals_in
from latentcache.store import DiskStore
from latentcache.store.directory import pack_name
from latentcache.store.pack import WholePack
from latentcache.types import Crop, Entry, Geometry, Record, Size

COMMON = {
    "schema": 1,
    "salt": "",
    "text_encoding": {"name": "served"},
    "image_encoding": {"scaling_factor": 0.13025, "shift_factor": None},
}
NUM_SAMPLES = 48
SHARED_CAPTIONS = 8
"""Every so many samples share one caption."""


def entries_of(number: int) -> list[Entry]:
    """The entries of a sample: its image, and its caption, which other samples share."""
    generator = torch.Generator().manual_seed(number)
    size = (8, 8, 16) if number % 2 else (8, 16, 8)
    image = {"moments": torch.randn(size, generator=generator).half()}
    generator.manual_seed(10_000 + number // SHARED_CAPTIONS)
    text = {
        "prompt_embeds": torch.randn((7, 16), generator=generator).half(),
        "pooled_prompt_embeds": torch.randn((8,), generator=generator).half(),
    }
    made = []
    for kind, n, tensors in (("image", number, image), ("text", number // SHARED_CAPTIONS, text)):
        identity = {"kind": kind, "served": n}
        made.append(Entry(Record(key_of(identity), kind, identity, {"path": f"{n}.png"}), tensors))
    return made


def make_manifest(name: str = "served", num_samples: int = NUM_SAMPLES) -> Manifest:
    rows = {}
    for number in range(num_samples):
        image, text = entries_of(number)
        size = Size(64, 128) if number % 2 else Size(128, 64)
        geometry = Geometry(size, size, Crop(0, 0), size)
        sample_id = f"{number}.png"
        caption = Ref.of_text(f"caption {number // SHARED_CAPTIONS}", text.record.key)
        rows[sample_id] = Row(sample_id, sample_id, None, (Ref(image.record.key, geometry),), (caption,))
    return Manifest(name, "train", 1, COMMON, rows)


def replace_packs(transport: Transport) -> list[str]:
    """Do with each pack as `verify` does with a damaged one: copy it to a new one, and list it. Returns those."""
    old = sorted(packs_in(transport).keys() - removals_in(transport).keys())
    for pack in old:
        whole = WholePack.in_memory(pack, transport.read(pack_name(pack))[0])
        row, copy = whole.part(whole.row.names())
        transport.write(pack_name(row.pack.id), copy, version=ANY_VERSION)
        transport.write(f"{REMOVALS}/{pack}", b"", version=ANY_VERSION)
    return old


def make_cache(path: Path, name: str = "served", num_samples: int = NUM_SAMPLES) -> Path:
    """A cache of these samples, in several packs."""
    with DiskStore(path) as store:
        for first in range(0, num_samples, 16):
            store.add(entry for number in range(first, first + 16) for entry in entries_of(number))
    ManifestFolder(path / "manifests").write(make_manifest(name, num_samples))
    return path
