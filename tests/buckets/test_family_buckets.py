"""Caches of several families in a bucket: moved there, read there, verified, pruned, and moved back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.family_walks import FEW_WALKS, assert_same_batches, assert_same_entries, walked

from latentcache import LatentCache

Run = Callable[..., Any]


@pytest.mark.parametrize("family", FEW_WALKS)
def test_a_cache_moves_to_a_bucket_and_back(family: str, tmp_path: Path, s3_url: str, run_json: Run) -> None:
    config = walked(tmp_path, family)
    for command in (
        ("push", config.cache.path, s3_url),
        ("verify", s3_url),
        ("prune", s3_url),
        ("pull", s3_url, tmp_path / "pulled"),
        ("sync", s3_url, tmp_path / "synced"),
    ):
        code, report = run_json(*command)
        assert code == 0, (command, report)
    with LatentCache(config.cache.path) as cached:
        with LatentCache(s3_url, local=tmp_path / "local") as remote:
            assert_same_batches(remote, cached)
        for name in ("pulled", "synced"):
            with LatentCache(tmp_path / name) as moved:
                assert_same_entries(moved.store, cached.store)
                assert all(
                    moved.manifests.read(each) == cached.manifests.read(each) for each in cached.manifests.names()
                )
