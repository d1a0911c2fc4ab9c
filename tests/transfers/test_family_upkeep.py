"""Damage to the caches of several families is found, and what is lost is encoded again, to the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.family_walks import FEW_WALKS, assert_same_entries, walked
from helpers.pack_damage import damage

from latentcache import LatentCache
from latentcache.precache.run import run_precache
from latentcache.store import DiskStore
from latentcache.store.entry import as_array

pytestmark = pytest.mark.families


@pytest.mark.parametrize("family", FEW_WALKS)
def test_damage_of_any_part_is_found_and_encoded_again(
    family: str, tmp_path: Path, run_json: Callable[..., Any]
) -> None:
    config, path = walked(tmp_path, family), tmp_path / "damaged"
    shutil.copytree(config.cache.path, path)
    with LatentCache(config.cache.path) as cached, DiskStore(path) as store:
        row = list(cached.manifest("walk").rows.values())[1]
        parts = (row.images, row.captions, row.parts[:1], row.parts[-1:])
        keys = {next(ref.key for ref in refs) for refs in parts if refs}
        for key in keys:
            damage(path, as_array(next(iter(cached.get(key).tensors.values()))).tobytes()[:64])
        code, report = run_json("verify", path)
        assert code == 1 and len(report["damaged"]) == len(keys)
        again = run_precache(config.model_copy(update={"cache": config.cache.model_copy(update={"path": path})}))
        assert again.num_encoded == again.num_misses == len(keys) and again.num_refused == 0
        assert run_json("verify", path)[1]["ok"]
        assert_same_entries(store, cached.store)
