"""Caches of several families are merged, verified, pruned and compacted: every entry keeps its bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.family_walks import WALKS, assert_same_entries, walked
from helpers.pack_damage import damage

from latentcache import LatentCache
from latentcache.config import Config
from latentcache.precache.run import run_precache
from latentcache.store import DiskStore
from latentcache.store.entry import as_array

pytestmark = pytest.mark.families
Run = Callable[..., Any]


@pytest.fixture(scope="module", params=WALKS)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    return walked(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def cached(config: Config) -> Iterator[LatentCache]:
    with LatentCache(config.cache.path) as cache:
        yield cache


def test_damage_of_any_part_is_found_and_encoded_again(
    config: Config, cached: LatentCache, tmp_path: Path, run_json: Run
) -> None:
    path, rows = tmp_path / "cache", cached.manifest("walk").rows
    shutil.copytree(str(cached.path), path)
    row = list(rows.values())[1]
    keys = {next(ref.key for ref in refs) for refs in (row.images, row.captions, row.parts[:1], row.parts[-1:]) if refs}
    for key in keys:
        tensor = next(iter(cached.get(key).tensors.values()))
        damage(path, as_array(tensor).tobytes()[:64])
    code, report = run_json("verify", path)
    assert code == 1 and len(report["damaged"]) == len(keys)
    again = run_precache(config.model_copy(update={"cache": config.cache.model_copy(update={"path": path})}))
    assert again.num_encoded == again.num_misses == len(keys) and again.num_refused == 0
    assert run_json("verify", path)[1]["ok"]
    with DiskStore(path) as store:
        assert_same_entries(store, cached.store)
