"""Two processes fill one cache at the same time. Kills in the middle of it are in scripts/soak_crash.py."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.photo_files import write_photo

from latentcache.config import Config
from latentcache.precache.run import run_precache
from latentcache.store.disk import DiskStore
from latentcache.store.upkeep import verify

NUM_PHOTOS = 100


@pytest.fixture
def many_photos(photos: Path) -> None:
    for number in range(NUM_PHOTOS):
        path = write_photo(photos / f"many{number}.png", 1000 + number, (64, 64))
        path.with_suffix(".txt").write_text(f"photo number {number}")


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
