"""A warm batch makes no call to the store for each sample."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from latentcache import LatentCache
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.manifest_row import CaptionRef, ImageRef, Row
from latentcache.identity import key_of
from latentcache.store import DiskStore
from latentcache.types import Crop, Entry, Geometry, Record, Size

BATCH = 16


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of two batches, each in a pack of its own."""
    path, rows = tmp_path_factory.mktemp("budget") / "cache", {}
    size = Size(64, 64)
    with DiskStore(path) as store:
        for start in (0, BATCH):
            entries = []
            for number in range(start, start + BATCH):
                keys = {}
                fields = {
                    "image": {"latents": (4, 8, 8)},
                    "text": {"prompt_embeds": (7, 16), "pooled_prompt_embeds": (8,)},
                }
                for kind, shapes in fields.items():
                    identity = {"number": number, "kind": kind}
                    keys[kind] = key_of(identity)
                    tensors = {name: torch.full(shape, number, dtype=torch.float16) for name, shape in shapes.items()}
                    entries.append(Entry(Record(keys[kind], kind, identity, {}), tensors))  # type: ignore[arg-type]
                images = (ImageRef(keys["image"], Geometry(size, size, Crop(0, 0), size)),)
                captions = (CaptionRef("a photo", keys["text"]),)
                rows[str(number)] = Row(str(number), str(number), None, images, captions)
            store.add(entries)
    scaling = {"scaling_factor": 0.13025, "shift_factor": None}
    common = {"schema": 1, "salt": "", "text_encoding": {}, "image_encoding": scaling}
    ManifestFolder(path / "manifests").write(Manifest("photos", "train", 1, common, rows))
    return path


@pytest.mark.parametrize("given", [False, True])
def test_a_warm_batch_asks_the_store_once(path: Path, given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    with LatentCache(path) as cache:
        sample_ids = [str(number) for number in range(BATCH)]
        batch = cache.batch(sample_ids, device="cpu")
        out = {name: batch[name] for name in ("latents", "prompt_embeds", "pooled_prompt_embeds")}
        for name in ("rows", "find", "describe", "record", "get", "prefetch"):
            plain = getattr(cache.store, name)
            monkeypatch.setattr(
                cache.store, name, lambda *values, plain=plain, name=name: calls.append(name) or plain(*values)
            )
        monkeypatch.setattr(type(cache.manifests), "read", lambda *_: pytest.fail("it read a manifest"))
        cache.batch(sample_ids, device="cpu", out=out if given else None)
    assert calls == ["rows"]
