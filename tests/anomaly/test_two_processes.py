"""Two processes fill one cache at the same time. Kills in the middle of it are in scripts/soak_crash.py."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import torch
from helpers.photo_files import write_photo

from latentcache.config import Config
from latentcache.precache.run import run_precache
from latentcache.store.disk import DiskStore
from latentcache.store.upkeep import verify

NUM_PHOTOS = 40


def test_two_processes_at_once_build_what_one_builds(
    make_config: Callable[..., Config], photos: Path, tmp_path: Path
) -> None:
    """RANK and WORLD_SIZE from the environment, as torchrun sets them, into one cache at the same time."""
    for number in range(NUM_PHOTOS):
        path = write_photo(photos / f"many{number}.png", 1000 + number, (64, 64))
        path.with_suffix(".txt").write_text(f"photo number {number}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["latentcache.precache.run", "latentcache.models.tiny"])
    shared, single = make_config(), make_config(**{"cache.path": tmp_path / "single"})
    children = [context.Process(target=precache_as_rank, args=(shared, rank)) for rank in range(2)]
    for child in children:
        child.start()
    run_precache(single)
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


def precache_as_rank(config: Config, rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    report = run_precache(config)
    assert report.num_encoded > 0 and report.world_size == 2
