"""What a training script gives a ValidationRunner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.runner_runs import validation_config

from latentcache import Config, LatentCache, run_precache
from latentcache.errors import ConfigError
from latentcache.integrations.diffusers import validation_parts


def test_a_config_without_a_training_set_is_named(make_config: Callable[..., Config], photos: Path) -> None:
    config = validation_config(make_config, photos)
    run_precache(config)
    held_out = [dataset for dataset in config.datasets if dataset.role == "validation"]
    assert held_out
    with (
        LatentCache(config.cache) as cache,
        pytest.raises(ConfigError, match="the config has no dataset with the role train"),
    ):
        validation_parts(config.model_copy(update={"datasets": tuple(held_out)}), cache)
