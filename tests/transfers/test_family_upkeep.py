"""Caches of several families are merged, verified, pruned and compacted: every entry keeps its bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.family_walks import WALKS, assert_same_batches, assert_same_entries, assert_same_entry, walked
from helpers.pack_damage import damage

from latentcache import LatentCache
from latentcache.config import Config
from latentcache.dataset.manifest_folder import ManifestFolder
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


def part_of(cached: LatentCache, path: Path, numbers: slice) -> Path:
    """A cache of some samples of the walk, and of all prompts."""
    manifests = [cached.manifests.read(name) for name in cached.manifests.names()]
    folder = ManifestFolder(path / "manifests")
    with DiskStore(path) as store:
        for manifest in manifests:
            assert manifest is not None
            rows = dict(list(manifest.rows.items())[numbers] if manifest.name == "walk" else manifest.rows.items())
            part = replace(manifest, rows=rows)
            store.add([cached.get(key) for key in sorted(part.keys() - set(store.keys()))])
            folder.write(part)
    return path


def test_halves_of_two_workers_are_merged(cached: LatentCache, tmp_path: Path, run_json: Run) -> None:
    halves = [part_of(cached, tmp_path / name, part) for name, part in (("a", slice(2)), ("b", slice(1, None)))]
    code, report = run_json("merge", tmp_path / "whole", *halves)
    assert code == 0, report
    with LatentCache(tmp_path / "whole") as merged:
        used = set().union(*(cached.manifest(name).keys() for name in cached.manifests.names()))
        assert set(merged.store.keys()) == used
        for key in used:
            assert_same_entry(merged.get(key), cached.get(key))
        assert merged.manifest("walk") == cached.manifest("walk")
        assert_same_batches(merged, cached)


def test_prune_and_compact_leave_what_a_sample_needs(cached: LatentCache, tmp_path: Path, run_json: Run) -> None:
    path, manifest = tmp_path / "cache", cached.manifest("walk")
    shutil.copytree(str(cached.path), path)
    assert run_json("prune", path)[1]["num_entries"] == 0
    kept = dict(list(manifest.rows.items())[1:])
    gone = manifest.keys() - replace(manifest, rows=kept).keys()
    ManifestFolder(path / "manifests").write(replace(manifest, rows=kept))
    code, report = run_json("prune", path)
    assert (code, report["num_entries"]) == (0, len(gone))
    code, report = run_json("compact", path)
    assert code == 0 and run_json("verify", path)[1]["ok"] and run_json("rebuild", path)[0] == 0
    with DiskStore(path) as store:
        assert set(store.keys()) == set(cached.store.keys()) - gone
        for key in store.keys():
            assert_same_entry(store.get(key), cached.get(key))


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
