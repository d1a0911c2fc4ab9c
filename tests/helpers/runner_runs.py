"""Validation runners for the small training run, over a cache of the `photos` fixture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.phase_training import Training

from latentcache.config import Config
from latentcache.loading.cache import LatentCache
from latentcache.precache.run import run_precache
from latentcache.validation.runner import ValidationRunner


def validation_config(make_config: Callable[..., Config], photos: Path, **changes: Any) -> Config:
    """`photos` for training, and again as validation set `held-out`; sample images of 64x96 in two steps."""
    base = make_config()
    held_out = base.datasets[0].model_copy(update={"name": "held-out", "role": "validation"})
    small = {"path": photos.parent / "validation", "height": 64, "width": 96, "num_inference_steps": 2}
    validation = base.validation.model_copy(update={**small, "num_timesteps": 2, **changes})
    return base.model_copy(update={"datasets": (base.datasets[0], held_out), "validation": validation})


def precache_training_set(config: Config) -> None:
    """Cache what a user has before the first validation: the training set, and no prompt but the empty one."""
    only = {"datasets": config.datasets[:1], "validation": config.validation.model_copy(update={"prompts": ()})}
    assert run_precache(config.model_copy(update=only)).num_refused == 0


def runner_for(training: Training, cache: LatentCache, config: Config, **options: Any) -> ValidationRunner:
    """A runner over all parts of the run."""
    parts = training.parts | {"scheduler": training.scheduler}
    return ValidationRunner(parts, cache, config, phases=training.phases, **options)
