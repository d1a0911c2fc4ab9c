"""What the soak programs interrupt: the operations on a cache, and what must hold after one was interrupted.

An operation is interrupted by a kill, a power cut or a fault. Afterwards the cache opens, and: no entry is wrong, none
is lost that was there before and should be there after, none that was acknowledged, manifests are old or new, nothing
half done is left, and running the operation again gives what an uninterrupted run gives.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from soaking import GEOMETRY, clone, entry_digest, leftovers, sample_entries, text_entry, write_manifest

from latentcache.config import Config
from latentcache.config_file import parse_config
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import EntryDamagedError
from latentcache.interop.importing import import_cache
from latentcache.interop.readers import ForeignImage, ForeignItem, ForeignText
from latentcache.loading.cache import LatentCache
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_parts
from latentcache.precache.memo import Memo
from latentcache.precache.run import run_precache
from latentcache.precache.tasks import Shard
from latentcache.precache.workspace import Workspace
from latentcache.store import DiskStore, writer
from latentcache.store.upkeep import compact, prune, rebuild, verify

PACK_ENTRIES = 3
"""Packs are small, so that seals and interruptions meet often."""
NUM_SAMPLES = 6
NUM_PHOTOS = 3

Note = Callable[[str, Sequence[str]], None]


def nothing_noted(event: str, keys: Sequence[str]) -> None:
    """For runs whose entries nobody follows."""


class NotingStore(DiskStore):
    """Notes the keys of each pack before it is sealed (`begin`) and after it is durable (`sealed`)."""

    def __init__(self, path: Path, note: Note):
        super().__init__(path)
        self._note = note

    def seal(self, entries: Any) -> Any:
        keys = [entry.key for entry in entries]
        self._note("begin", keys)
        sealed = super().seal(entries)
        self._note("sealed", keys)
        return sealed


class NoteFile:
    """Notes of a process that may be killed at any moment: each is one write at the end of a file."""

    def __init__(self, path: Path):
        self.path = path
        path.unlink(missing_ok=True)

    def __call__(self, event: str, keys: Sequence[str]) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(fd, json.dumps([event, list(keys)]).encode() + b"\n")
        os.close(fd)

    def keys(self, event: str) -> set[str]:
        """The keys of all notes of this event."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return {key for found, keys in map(json.loads, lines) if found == event for key in keys}


class Operation(NamedTuple):
    """`prepare` makes a cache, and `run` does the operation on it, which it may be called for again."""

    name: str
    prepare: Callable[[Path], None]
    run: Callable[[Path, Note], object]


# Precache ------------------------------------------------------------------------------------------------------------


class Precache:
    """Runs of precache over photos in `folder`, with the tiny models, which are loaded once."""

    def __init__(self, folder: Path, num_photos: int = 2 * NUM_PHOTOS):
        torch.set_num_threads(1)
        self.folder = folder
        self.models = LoadedModels(**tiny_parts())
        for number in range(num_photos):
            self._write_photo(number)

    def _write_photo(self, number: int) -> None:
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        for role in ("first", "all") if number < NUM_PHOTOS else ("all",):
            path = self.folder / role / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
            path.with_suffix(".txt").write_text(f"photo number {number}")

    def config(self, cache: Path, role: str = "all") -> Config:
        """`first` has the first NUM_PHOTOS photos, `all` has all."""
        settings = {
            "cache": {"path": cache},
            "datasets": [
                {
                    "name": "photos",
                    "source": {"kind": "folder", "path": self.folder / role},
                    "buckets": {"area": 64 * 64, "step": 32},
                    "images": {"min_side": 8},
                }
            ],
            "model": {"path": "tiny"},
            "encode": {"device": "cpu", "num_workers": 1},
            "validation": {"prompts": ["a prompt"]},
        }
        return parse_config(settings)

    def run(self, cache: Path, note: Note = nothing_noted, *, role: str = "all", shard: Shard | None = None) -> None:
        """Encode what is missing."""
        store = NotingStore(cache, note)
        with Workspace(store, ManifestFolder(cache / "manifests"), Memo(cache / "memo"), cache) as workspace:
            run_precache(self.config(cache, role), models=self.models, workspace=workspace, shard=shard)


# The operations ------------------------------------------------------------------------------------------------------


class _ForeignCache:
    """What a reader of another trainer's cache gives, without its files."""

    format = "kohya"
    family = "sdxl"

    def items(self) -> Iterator[ForeignItem]:
        generator = torch.Generator().manual_seed(1)
        for number in range(NUM_SAMPLES):
            name = f"{number}.png"
            latents = torch.randn(4, 8, 8, generator=generator)
            yield ForeignImage(name, f"{name}.npz", None, latents, False, "sample", GEOMETRY)
            embeds, pooled = torch.randn(5, 16, generator=generator), torch.randn(8, generator=generator)
            yield ForeignText((name,), f"{name}.npz", f"caption {number}", embeds, pooled)


def _fill(cache: Path, num_samples: int = NUM_SAMPLES) -> None:
    """Packs of PACK_ENTRIES entries, an index, and a manifest of all samples."""
    with DiskStore(cache) as store:
        store.add(sample_entries(range(num_samples)))
    write_manifest(cache, "train", range(num_samples))


def _fill_with_waste(cache: Path) -> None:
    """As `_fill`, and every third entry was removed since: some packs are mostly dead."""
    _fill(cache)
    with DiskStore(cache) as store:
        store.remove(sorted(store.keys())[::3])


def _fill_with_orphans(cache: Path) -> None:
    """As `_fill`, and half of the samples are in no manifest any more."""
    _fill(cache)
    write_manifest(cache, "train", range(0, NUM_SAMPLES, 2))


def _fill_with_damage(cache: Path) -> None:
    """As `_fill`, and a bit of one entry was flipped."""
    _fill(cache)
    needle = text_entry(1).tensors["prompt_embeds"].numpy().tobytes()
    for pack in sorted(cache.glob("packs/*/*.safetensors")):
        data = bytearray(pack.read_bytes())
        if (at := data.find(needle)) >= 0:
            data[at] ^= 1
            pack.write_bytes(data)


def _fill_as_after_a_death(cache: Path) -> None:
    """As `_fill`, without an index, with a half-written pack, and with an older index that was being replaced."""
    _fill(cache)
    pack = next(cache.glob("packs/*/*.safetensors"))
    pack.with_name(f".{pack.name}.12345678.tmp").write_bytes(pack.read_bytes()[:1000])
    (cache / "index").rename(cache / "index.removed-12345678")


def _add(cache: Path, note: Note) -> None:
    with NotingStore(cache, note) as store:
        store.add(sample_entries(range(NUM_SAMPLES)))
    write_manifest(cache, "train", range(NUM_SAMPLES))


def _import(cache: Path, note: Note) -> None:
    store = NotingStore(cache, note)
    with Workspace(store, ManifestFolder(cache / "manifests"), path=cache) as workspace:
        import_cache(_ForeignCache(), workspace, name="imported", scale_check=False)


def _prune(cache: Path, note: Note) -> None:
    manifest = ManifestFolder(cache / "manifests").read("train")
    assert manifest is not None
    prune(cache, manifest.keys())


def _read(cache: Path, note: Note) -> None:
    """As a trainer does. AssertionError for a batch that is not what was stored."""
    with LatentCache(cache) as opened:
        for name in opened.sample_ids():
            batch = opened.batch([name], device="cpu", output="moments")
            image, text = sample_entries([int(name.removesuffix(".png"))])
            for field, tensor in (*image.tensors.items(), *text.tensors.items()):
                assert torch.equal(batch[field][0], tensor), f"{name} {field} is wrong"


def operations(precache: Precache) -> dict[str, Operation]:
    """All operations by name. Sets the size of packs for this process."""
    writer.PACK_ENTRIES = PACK_ENTRIES
    return {
        operation.name: operation
        for operation in (
            Operation("precache", lambda cache: precache.run(cache, role="first"), precache.run),
            Operation("add", lambda cache: _fill(cache, 2), _add),
            Operation("import", _fill, _import),
            Operation("read", _fill, _read),
            Operation("verify", _fill_with_damage, lambda cache, note: verify(cache)),
            Operation("prune", _fill_with_orphans, _prune),
            Operation("compact", _fill_with_waste, lambda cache, note: compact(cache)),
            Operation("rebuild", _fill, lambda cache, note: rebuild(cache)),
            Operation("open", _fill_as_after_a_death, lambda cache, note: DiskStore(cache).close()),
        )
    }


# What must hold ------------------------------------------------------------------------------------------------------


def values(cache: Path) -> dict[str, str]:
    """The digest of each entry that can be read, by key. Damaged entries are absent."""
    found = {}
    with DiskStore(cache) as store:
        for key in list(store.keys()):
            with suppress(EntryDamagedError):
                found[key] = entry_digest(store.get(key), provenance=False)
    return found


def manifests(cache: Path) -> dict[str, Any]:
    """What each manifest says but for the time of an import. DatasetError for one that cannot be read."""
    folder = ManifestFolder(cache / "manifests")
    found = {}
    for name in folder.names():
        manifest = folder.read(name)
        assert manifest is not None
        common = json.loads(json.dumps(manifest.common))
        common.get("imported", {}).pop("time", None)
        found[name] = replace(manifest, common=common)
    return found


class Scene:
    """An operation on a cache in `folder`, which each interruption finds as it was."""

    def __init__(self, operation: Operation, folder: Path):
        self.operation, self.cache = operation, folder / operation.name / "cache"
        self.cache.parent.mkdir(parents=True)
        operation.prepare(self.cache)
        self._template = self.cache.rename(self.cache.parent / "template")
        self._spare = self.cache.parent / "spare"
        self.before, self.manifests_before = self._seen(self._template)
        clone(self._template, self.cache)
        operation.run(self.cache, nothing_noted)
        self.after, self.manifests_after = self._seen(self.cache)

    def _seen(self, cache: Path) -> tuple[Mapping[str, str], Mapping[str, Any]]:
        """Entries and manifests of a copy, which is opened and so put in order."""
        clone(cache, self._spare)
        return values(self._spare), manifests(self._spare)

    def new(self) -> Path:
        """The cache before the operation."""
        return clone(self._template, self.cache)

    def run(self, note: Note = nothing_noted) -> None:
        """The operation, on the cache that `new` made."""
        self.operation.run(self.cache, note)

    def check(self, cache: Path | None = None, sealed: Collection[str] = ()) -> None:
        """What must hold when a cache is opened after an interruption. `sealed` are the keys that were acknowledged."""
        cache = cache or self.cache
        found = values(cache)
        wrong = [key for key, value in found.items() if value not in (self.before.get(key), self.after.get(key))]
        assert not wrong, f"{len(wrong)} wrong entries are served: {wrong[:3]}"
        lost = (self.before.keys() & self.after.keys() | set(sealed)) - found.keys()
        assert not lost, f"{len(lost)} entries are lost: {sorted(lost)[:3]}"
        for name, manifest in manifests(cache).items():
            known = [seen[name] for seen in (self.manifests_before, self.manifests_after) if name in seen]
            assert manifest in known, f"manifest {name} is neither the old nor the new one"
        missing = self.manifests_before.keys() & self.manifests_after.keys() - manifests(cache).keys()
        assert not missing, f"manifests are gone: {missing}"
        left = [name for name in _left(cache) if not name.startswith("memo")]  # which precache alone opens
        assert not left, f"the opening left {left}"

    def finish(self, cache: Path | None = None) -> None:
        """Run the operation again: what it gives is what an uninterrupted run gives."""
        cache = cache or self.cache
        self.operation.run(cache, nothing_noted)
        assert values(cache) == self.after, "the rerun gave other entries than an uninterrupted run"
        assert manifests(cache) == self.manifests_after, "the rerun gave other manifests"
        report = verify(cache)
        assert not report.damaged and not report.unreadable, f"after the rerun: {report.damaged} {report.unreadable}"
        assert not _left(cache), f"the rerun left {_left(cache)}"


def _left(cache: Path) -> list[str]:
    """Leftovers, but for SQLite's journals: one that says nothing is removed with the next change."""
    return [name for name in leftovers(cache) if not name.endswith("-journal")]
