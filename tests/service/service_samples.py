"""A small cache that a server serves, and what lies in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from helpers.serving import RunningServer

from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Ref, Row
from latentcache.identity import key_of
from latentcache.store import DiskStore
from latentcache.types import Crop, Entry, Geometry, Record, Size


def entry(number: int, *, kind: str = "image", length: int | None = None) -> Entry:
    """A small entry; with a `length` it has a ragged field."""
    identity = {"number": number, "kind": kind}
    provenance = {"path": f"photos/{number}.jpg", "software": {"torch": "2.13.0"}}
    tensors = {"moments": torch.randn((8, 4, 4), generator=torch.Generator().manual_seed(number)).half()}
    ragged = frozenset[str]()
    if length is not None:
        tensors["hidden"] = torch.arange(length * 3, dtype=torch.float32).reshape(length, 3) + number
        ragged = frozenset({"hidden"})
    return Entry(Record(key_of(identity), kind, identity, provenance), tensors, ragged)


def manifest(name: str, entries: list[Entry]) -> Manifest:
    """A manifest of these entries, a sample each."""
    geometry = Geometry(Size(80, 80), Size(64, 64), Crop(0, 0), Size(64, 64))
    common = {
        "schema": 1,
        "salt": "",
        "text_encoding": {},
        "image_encoding": {"scaling_factor": 0.13025, "shift_factor": None},
    }
    rows = {}
    for number, each in enumerate(entries):
        caption = Ref.of_text(f"a {'Red' if number % 2 else 'blue'} house, number {number}, Müller", each.record.key)
        name_of = f"photo{number}.jpg"
        rows[name_of] = Row(name_of, f"/photos/{name_of}", None, (Ref(each.record.key, geometry),), (caption,))
    return Manifest(name, "train", 1, common, rows)


@dataclass(repr=False)
class ServedCache:
    """A running server, and what its cache holds."""

    server: RunningServer
    path: Path
    entries: list[Entry]
    manifest: Manifest

    @property
    def keys(self) -> list[str]:
        return [each.record.key for each in self.entries]


def fill(path: Path) -> ServedCache:
    """A cache directory with entries of two kinds, some of them ragged, in two packs, and a manifest of them."""
    images, texts = [entry(n) for n in range(12)], [entry(n, kind="text", length=n + 1) for n in range(4)]
    with DiskStore(path) as store:
        store.add(images)
        store.add(texts)
    listed = manifest("photos", images)
    ManifestFolder(path / "manifests").write(listed)
    return ServedCache(None, path, [*images, *texts], listed)  # type: ignore[arg-type]  # `served` starts it
