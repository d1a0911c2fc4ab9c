"""The stages overlap: how far they run ahead, within which memory, and with the same entries as without overlap."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.fake_streams import Streams
from helpers.photo_files import write_photo

from latentcache import LatentCache
from latentcache.config import Config
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.devices.transfer import StreamTransfer
from latentcache.precache import stages, tasks
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace
from latentcache.store.memory import MemoryStore
from latentcache.store.writer import Writer
from latentcache.types import Entry
from latentcache.utils.progress import Progress

Make = Callable[..., Config]


@pytest.fixture
def more_photos(photos: Path) -> int:
    """Thirty more photos of one bucket, each with a caption; how many images there are."""
    for number in range(30):
        path = write_photo(photos / f"more{number:02}.png", 50 + number, (64, 64))
        path.with_suffix(".txt").write_text(f"photo number {number}")
    return 35


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """The CPU as a device whose copies overlap the computation: batches are launched ahead."""
    streams = Streams()
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(StreamTransfer, "host_memory", lambda self, shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(stages, "transfer_to", lambda device: StreamTransfer(device, streams))
    return streams


def entries(config: Config) -> dict[str, dict[str, torch.Tensor]]:
    with LatentCache(config.cache.path) as cache:
        return {key: dict(cache.get(key).tensors) for key in cache.store.keys()}


def test_launching_ahead_changes_no_entry(
    make_config: Make, more_photos: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    settings = {"encode.batch_size": 4, "encode.store_dtype": "float16"}
    plain, ahead = (make_config(**settings, **{"cache.path": tmp_path / name}) for name in ("plain", "ahead"))
    first = run_precache(plain)
    streams = request.getfixturevalue("overlapping")
    second = run_precache(ahead)
    assert "host sleeps for" in " ".join(streams.log)
    assert (second.num_encoded, second.num_refused) == (first.num_encoded, 0)
    one, two = entries(plain), entries(ahead)
    assert one.keys() == two.keys()
    for key, tensors in one.items():
        assert all(torch.equal(tensor, two[key][name]) for name, tensor in tensors.items())


def test_memory_stays_flat(
    make_config: Make, more_photos: int, overlapping: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of stages.py, with T = 2 threads, G = 3 images in a group, B = 3 in a batch, and a slow writer."""
    lock, live, most = threading.Lock(), 0, 0
    prepare, add = tasks.prepare, Writer.add

    def change(by: int) -> None:
        nonlocal live, most
        with lock:
            live += by
            most = max(most, live)

    def counted(*arguments: Any) -> np.ndarray:
        prepared = prepare(*arguments)
        weakref.finalize(prepared, change, -1)
        change(1)
        return prepared

    def slowly(writer: Writer, entry: Entry) -> None:
        time.sleep(0.03 if entry.record.kind == "image" else 0)
        add(writer, entry)

    monkeypatch.setattr(tasks, "prepare", counted)
    monkeypatch.setattr(Writer, "add", slowly)
    config = make_config(**{"encode.batch_size": 3, "encode.num_workers": 2})
    report = run_precache(config, workspace=Workspace(store=MemoryStore()))
    assert report.num_refused == 0
    bound = 2 + 3 + 5 * 3
    assert most <= bound < more_photos, "the dataset must be larger than the bound"
    assert live == 0


def test_a_stop_while_batches_are_under_way(make_config: Make, more_photos: int, overlapping: Streams) -> None:
    stop = threading.Event()

    class Stops(Progress):
        stage, done = "", 0

        def start(self, stage: str, total: int | None) -> None:
            self.stage = stage

        def advance(self, count: int = 1) -> None:
            self.done += count if self.stage == "encode images" else 0
            if self.done >= 4:
                stop.set()

    config = make_config(**{"encode.batch_size": 2})
    first = run_precache(config, progress=Stops(), stop=stop)
    assert first.interrupted and ManifestFolder(config.cache.path / "manifests").names() == []
    report = run_precache(config, stop=stop)
    assert (report.interrupted, report.num_samples) == (True, 0), "it is set while the run plans"
    second = run_precache(config)
    assert not second.interrupted and second.num_hits == first.num_encoded
    assert second.num_encoded >= more_photos - 6
