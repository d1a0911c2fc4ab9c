"""Several families on a Ray cluster: clips, control images and ragged texts are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.family_walks import assert_same_entries, walk_config

from latentcache.config import Config, RayConfig
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.precache.run import run_precache
from latentcache.scaleout.ray import precache
from latentcache.store import DiskStore

RAY = RayConfig(num_gpus=1, num_cpus=0.1, max_encoders=1, wait_s=250)


def at(config: Config, path: Path) -> Config:
    return config.model_copy(update={"cache": config.cache.model_copy(update={"path": path}), "ray": RAY})


@pytest.mark.parametrize("family", ["flux", "wan-i2v"])
def test_a_cluster_makes_what_one_process_makes(family: str, cluster: Any, tmp_path: Path) -> None:
    config = walk_config(tmp_path, family)
    alone, shared = at(config, tmp_path / "alone"), at(config, tmp_path / "shared")
    one, many = run_precache(alone), precache(shared, address=cluster.address)
    assert many.refused == one.refused == []
    assert (many.num_encoded, many.misses_by_reason) == (one.num_encoded, one.misses_by_reason)
    with DiskStore(alone.cache.path) as first, DiskStore(shared.cache.path) as second:
        assert_same_entries(second, first)
    of_one, of_many = (ManifestFolder(each.cache.path / "manifests") for each in (alone, shared))
    assert of_one.names() == of_many.names()
    assert all(of_one.read(name) == of_many.read(name) for name in of_one.names())
