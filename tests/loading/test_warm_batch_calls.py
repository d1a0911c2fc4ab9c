"""A warm batch makes no call for each sample, neither to the store nor elsewhere in the package."""

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
from latentcache.identity import key_of
from latentcache.store import DiskStore
from latentcache.types import Crop, Entry, Geometry, Record, Size

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


def calls_of_a_warm_batch(cache: LatentCache, size: int, given: bool) -> Counter[str]:
    sample_ids = [str(number) for number in range(size)]
    batch = cache.batch(sample_ids, device="cpu")
    out = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and name != "add_time_ids"}
    for _ in range(30):  # until nothing is prefetched
        cache.batch(sample_ids, device="cpu")
    with counted() as calls:
        cache.batch(sample_ids, device="cpu", out=out if given else None)
    return calls


@pytest.mark.parametrize("given", [False, True])
def test_a_warm_batch_makes_no_call_for_each_sample(path: Path, given: bool) -> None:
    with LatentCache(path) as cache:
        few, many = (calls_of_a_warm_batch(cache, size, given) for size in (4, BATCH))
    assert few == many and few
