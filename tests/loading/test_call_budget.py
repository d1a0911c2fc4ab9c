"""How many Python functions of the package run from the opening of a cache to its batches: fewer are read faster."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import latentcache
from latentcache import LatentCache
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.manifest_row import CaptionRef, ImageRef, Row
from latentcache.families import DEFAULT, family_named
from latentcache.identity import key_of
from latentcache.store import DiskStore
from latentcache.types import Crop, Entry, Geometry, Record, Size

OPEN_CALLS = 151
FIRST_BATCH_CALLS = 355  # six of them, once for each manifest, ask its family how texts are padded
WARM_BATCH_CALLS = 17
BATCH = 16
PACKAGE = str(Path(latentcache.__file__).parent)


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


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The calls of the package's functions inside the block, in all threads."""
    calls: Counter[str] = Counter()

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"] += 1

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def check(calls: Counter[str], limit: int) -> None:
    assert calls.total() <= limit, f"{calls.total()} calls, {limit} are allowed: {calls.most_common(25)}"


@pytest.fixture
def cache(path: Path) -> Iterator[LatentCache]:
    LatentCache(path).close()  # imports and first calls
    family_named(DEFAULT)  # another import
    with LatentCache(path) as cache:
        cache.sample_ids()  # reads the manifest
        yield cache


def test_opening_a_cache(path: Path) -> None:
    LatentCache(path).close()
    with counted() as calls:
        cache = LatentCache(path)
    cache.close()
    check(calls, OPEN_CALLS)


def test_the_first_batch(cache: LatentCache) -> None:
    with counted() as calls:
        cache.batch([str(number) for number in range(BATCH)], device="cpu")
    check(calls, FIRST_BATCH_CALLS)


@pytest.mark.parametrize("given", [False, True])
def test_a_warm_batch(cache: LatentCache, given: bool) -> None:
    sample_ids = [str(number) for number in range(2, 2 + BATCH)]
    batch = cache.batch(sample_ids, device="cpu")
    out = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and name != "add_time_ids"}
    for _ in range(30):  # until nothing is prefetched
        cache.batch(sample_ids, device="cpu")
    with counted() as calls:
        cache.batch(sample_ids, device="cpu", out=out if given else None)
    check(calls, WARM_BATCH_CALLS + given * (2 + len(out)))
