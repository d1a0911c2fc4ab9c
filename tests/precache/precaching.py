"""What a config precaches with the tiny model, and the rows of its dataset."""

from __future__ import annotations

from typing import Any

from latentcache import LatentCache
from latentcache.config import Config
from latentcache.dataset.row_table import Row
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_parts
from latentcache.precache.report import Report
from latentcache.precache.run import run_precache


def run(config: Config, **options: Any) -> Report:
    return run_precache(config, models=LoadedModels(**tiny_parts()), **options)


def rows_of(config: Config) -> dict[str, Row]:
    with LatentCache(config.cache) as cache:
        return dict(cache.manifest("photos").rows)


def row_of(config: Config, sample_id: str) -> Row:
    return rows_of(config)[sample_id]
