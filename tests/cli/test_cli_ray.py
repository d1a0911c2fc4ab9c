"""`precache --ray` and the section `ray`, as far as no cluster is needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from latentcache.config import Config
from latentcache.config_file import load_config, parse_config
from latentcache.errors import ConfigError
from latentcache.precache.run import run_precache
from latentcache.scaleout.ray import RayCluster, precache


def test_an_address_where_nothing_listens_is_an_error_within_a_minute(
    make_config: Callable[..., Config], tmp_path: Path, run_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray alone tries for a quarter of an hour."""
    config_file = tmp_path / "config.json"
    config_file.write_text(make_config().model_dump_json(exclude_defaults=True), encoding="utf-8")
    code, error = run_json("precache", config_file, "--ray", "127.0.0.1:1")
    assert code == 2 and "127.0.0.1:1" in error["error"] and "refused" in error["error"]
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    code, error = run_json("precache", config_file, "--ray", "auto")
    assert code == 2 and "refused" in error["error"]


def test_what_cannot_run_on_a_cluster_is_refused(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no cache of a cluster"):
        precache(make_config(**{"cache.store": "cpu"}))
    with pytest.raises(ConfigError, match="give no number"):
        precache(make_config(**{"encode.device": "cuda:1"}))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start one process"):
        precache(make_config())


def test_keys_are_planned_for_the_device_of_the_encoders(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A laptop plans for GPUs that it lacks: the text encoders compute in float16 there. Paths are absolute."""
    there = RayCluster(make_config(**{"encode.device": "cuda"}), "auto")
    assert (RayCluster(make_config(), "auto").device.type, there.device.type) == ("cpu", "cuda")
    assert RayCluster(make_config(**{"encode.device": "auto", "ray.num_gpus": 0}), "auto").device.type == "cpu"
    assert RayCluster(make_config(**{"encode.device": "auto", "ray.num_gpus": 0.5}), "auto").device.type != "cpu"
    report = run_precache(there.config, remote_encoders=there, dry_run=True)
    assert report.num_misses == 12 and report.placement["text"].startswith("cuda float16")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    given = make_config(**{"cache.path": "here/cache", "model.path": "model", "model.vae": "someone/a-hub-id"})
    config = RayCluster(given, "auto").config
    assert config.cache.path == tmp_path / "here/cache" and config.model.path == str(tmp_path / "model")
    assert config.model.vae == "someone/a-hub-id"


def test_the_example_of_a_cluster_is_valid() -> None:
    config = load_config(Path(__file__).parents[2] / "examples/cluster/cluster.yaml")
    assert parse_config(config.model_dump(mode="json")).ray.max_encoders == 16
