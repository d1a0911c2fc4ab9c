"""A small cache to serve: random images in two buckets, and captions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Ref, Row
from latentcache.families import sdxl
from latentcache.identity import key_of
from latentcache.remote.transport import ANY_VERSION, REMOVALS, Transport, packs_in, removals_in
from latentcache.store import DiskStore
from latentcache.store.directory import pack_name
from latentcache.store.pack import WholePack
from latentcache.store.upkeep import verify
from latentcache.types import Crop, Entry, Geometry, Kind, Record, Size

IMAGE_ENCODING = {"scaling_factor": sdxl.SCALING_FACTOR, "shift_factor": None}
COMMON = {"schema": 1, "salt": "", "text_encoding": {"name": "served"}, "image_encoding": IMAGE_ENCODING}
NUM_SAMPLES = 48
SHARED_CAPTIONS = 8
"""How many consecutive samples share a caption."""


def make_entry(kind: Kind, what: object, tensors: dict[str, torch.Tensor], **provenance: Any) -> Entry:
    """An entry whose key is made of its kind and `what`. Images count as SDXL's."""
    identity = {"kind": kind, "served": what}
    if kind == "image":
        identity["encoding"] = IMAGE_ENCODING
    return Entry(Record(key_of(identity), kind, identity, provenance), tensors)


def entries_of(number: int) -> list[Entry]:
    """The entries of a sample: its image, and its caption, which is shared with others."""
    generator = torch.Generator().manual_seed(number)
    size = (8, 8, 16) if number % 2 else (8, 16, 8)
    image = {"moments": torch.randn(size, generator=generator).half()}
    caption = number // SHARED_CAPTIONS
    generator.manual_seed(10_000 + caption)
    text = {
        "prompt_embeds": torch.randn((7, 16), generator=generator).half(),
        "pooled_prompt_embeds": torch.randn((8,), generator=generator).half(),
    }
    return [make_entry("image", number, image, path=f"{number}.png"), make_entry("text", caption, text)]


def entries_by_key(numbers: range) -> dict[str, Entry]:
    """The distinct entries of these samples, by key."""
    return {entry.record.key: entry for number in numbers for entry in entries_of(number)}


def assert_same(found: Entry, entry: Entry) -> None:
    """Assert that an entry is bit-identical to what was stored."""
    assert found.record == entry.record and found.ragged == entry.ragged
    assert found.tensors.keys() == entry.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in entry.tensors.items())


def key_of_image(number: int) -> str:
    return entries_of(number)[0].record.key


def make_manifest(name: str = "served", numbers: range = range(NUM_SAMPLES)) -> Manifest:
    """A manifest of these samples."""
    rows = {}
    for number in numbers:
        image, text = entries_of(number)
        size = Size(64, 128) if number % 2 else Size(128, 64)
        geometry = Geometry(size, size, Crop(0, 0), size)
        sample_id = f"{number}.png"
        caption = Ref.of_text(f"caption {number // SHARED_CAPTIONS}", text.record.key)
        rows[sample_id] = Row(sample_id, sample_id, None, (Ref(image.record.key, geometry),), (caption,))
    return Manifest(name, "train", 1, COMMON, rows)


def fill(path: Path, numbers: range, name: str | None = "photos", per_pack: int = 8) -> Path:
    """Write a cache of these samples, with `per_pack` samples in a pack, and their manifest."""
    with DiskStore(path) as store:
        for first in range(numbers.start, numbers.stop, per_pack):
            store.add(entry for n in range(first, min(first + per_pack, numbers.stop)) for entry in entries_of(n))
    if name is not None:
        ManifestFolder(path / "manifests").write(make_manifest(name, numbers))
    return path


def make_cache(path: Path, name: str = "served", num_samples: int = NUM_SAMPLES) -> Path:
    """Write a cache of the first samples, in several packs."""
    return fill(path, range(num_samples), name, per_pack=16)


def packs_of(path: Path) -> dict[str, bytes]:
    """The bytes of the packs in a cache directory, by id."""
    return {each.stem: each.read_bytes() for each in path.glob("packs/*/*.safetensors")}


def check(path: Path, numbers: range) -> None:
    """Assert that the cache has these samples, bit by bit, and no damage."""
    with DiskStore(path, create=False) as store:
        for key, entry in entries_by_key(numbers).items():
            assert_same(store.get(key), entry)
    assert verify(path).ok


def manifest_of(path: Path, name: str = "photos") -> Manifest | None:
    return ManifestFolder(path / "manifests").read(name)


def replace_packs(transport: Transport) -> list[str]:
    """Replace each pack like `verify` does with a damaged one: copy it, and list the old one. Returns the old ones."""
    old = sorted(packs_in(transport).keys() - removals_in(transport).keys())
    for pack in old:
        whole = WholePack.in_memory(pack, transport.read(pack_name(pack))[0])
        row, copy = whole.part(whole.row.names())
        transport.write(pack_name(row.pack.id), copy, version=ANY_VERSION)
        transport.write(f"{REMOVALS}/{pack}", b"", version=ANY_VERSION)
    return old
