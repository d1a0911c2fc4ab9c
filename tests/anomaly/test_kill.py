"""kill -9 in the middle of precache, again and again: no sealed entry lost, none torn, the rerun completes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
from helpers.photo_files import write_photo

from latentcache.config import Config
from latentcache.precache.run import run_precache
from latentcache.store import writer
from latentcache.store.disk import DiskStore
from latentcache.store.upkeep import verify
from latentcache.utils.progress import Progress

NUM_KILLS = 20
NUM_PHOTOS = 250


class Slowly(Progress):
    """Makes a run long enough for twenty kills, and says when it has begun to seal."""

    def __init__(self, encoding: Event):
        self.encoding = encoding
        self.num_encoded = 0
        self.stage = ""

    def start(self, stage: str, total: int | None) -> None:
        self.stage = stage

    def advance(self, count: int = 1) -> None:
        if self.stage.startswith("encode"):
            self.num_encoded += count
        if self.num_encoded >= 7:  # two packs are full, and the first of them is sealed
            self.encoding.set()
        time.sleep(0.02)


def precache_in_small_packs(config: Config, encoding: Event | None = None) -> None:
    """What the child does. Small packs, so that seals and kills meet often; one thread, so that bits are the same."""
    torch.set_num_threads(1)
    writer.PACK_ENTRIES = 3
    run_precache(config, progress=Slowly(encoding) if encoding else None)


@pytest.fixture
def many_photos(photos: Path) -> None:
    for number in range(NUM_PHOTOS):
        path = write_photo(photos / f"many{number}.png", 1000 + number, (64, 64))
        path.with_suffix(".txt").write_text(f"photo number {number}")


def test_twenty_kills(make_config: Callable[..., Config], many_photos: None, tmp_path: Path) -> None:
    # A server that has imported torch but never used it: its forks start at once and share no threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["latentcache.precache.run", "latentcache.models.tiny"])
    generator = random.Random(20)
    config = make_config()
    sealed: set[str] = set()
    grew = 0
    for kill in range(NUM_KILLS):
        encoding = context.Event()
        child = context.Process(target=precache_in_small_packs, args=(config, encoding))
        child.start()
        if kill % 5:  # every fifth kill may hit the opening, the sweep or the plan
            assert encoding.wait(60)
        time.sleep(generator.uniform(0.0, 0.35))
        child.kill()
        child.join(10)
        assert child.exitcode == -signal.SIGKILL, "the run must not have finished: make it longer"
        if not (config.cache.path / "CACHE.json").exists():
            continue
        with DiskStore(config.cache.path, read_only=True) as store:
            now = set(store.keys())
            assert sealed <= now, "a sealed entry was lost"
            grew += len(now) > len(sealed)
            sealed = now
            report = verify(store)
            assert report.ok and report.num_entries == len(now), "a torn entry is visible"
    assert grew >= NUM_KILLS // 2, "most kills must hit a run that is sealing"

    child = context.Process(target=precache_in_small_packs, args=(config,))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    assert not list(config.cache.path.rglob("*.tmp")), "files of dead writers are swept"

    reference = make_config(**{"cache.path": tmp_path / "reference"})
    child = context.Process(target=precache_in_small_packs, args=(reference,))
    child.start()
    child.join(120)
    with DiskStore(config.cache.path) as killed, DiskStore(reference.cache.path) as whole:
        assert verify(killed).ok
        keys = set(whole.keys())
        assert set(killed.keys()) == keys and sealed <= keys
        for key in keys:
            a, b = killed.get(key).tensors, whole.get(key).tensors
            assert all(torch.equal(a[name], b[name]) for name in b)


def test_two_processes_at_once_build_what_one_builds(
    make_config: Callable[..., Config], many_photos: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RANK and WORLD_SIZE from the environment, as torchrun sets them, into one cache at the same time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["latentcache.precache.run", "latentcache.models.tiny"])
    shared, single = make_config(), make_config(**{"cache.path": tmp_path / "single"})
    children = [context.Process(target=precache_as_rank, args=(shared, rank, 2)) for rank in range(2)]
    children.append(context.Process(target=precache_as_rank, args=(single, 0, 1)))
    for child in children:
        child.start()
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    with DiskStore(shared.cache.path) as two, DiskStore(single.cache.path) as one:
        keys = set(one.keys())
        assert set(two.keys()) == keys and len(keys) > 2 * NUM_PHOTOS
        for key in keys:
            a, b = two.get(key).tensors, one.get(key).tensors
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        assert verify(two).ok


def precache_as_rank(config: Config, rank: int, world_size: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    report = run_precache(config)
    assert report.num_encoded > 0 and report.world_size == world_size
