"""The scheduler of a model of any family. Filling a cache needs none."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import diffusers

from latentcache.checkpoints.checkpoint import is_training_checkpoint
from latentcache.config import ModelConfig
from latentcache.families.base import Family
from latentcache.models.family import family_of
from latentcache.models.files import (
    TINY,
    config_folder,
    is_checkpoint,
    is_tiny,
    loading,
    local_folder,
    read_config,
    refused,
)
from latentcache.models.single_file import read_file
from latentcache.models.tiny import tiny_part

logger = logging.getLogger("latentcache")

_FILE = "scheduler/scheduler_config.json"


def load_scheduler(
    path: str | Path | None = None, *, model: ModelConfig | None = None, family: Family | None = None
) -> Any:
    """A new scheduler, of the class and settings that the model's scheduler_config.json states.

    A whole diffusers folder or hub id at `path` has its own. Everything else (a denoiser alone, a checkpoint) has none,
    and takes that of `model`; a checkpoint file's is that of its configs. The tensors `v_pred` and `ztsnr` in such a
    file overrule it: by them kohya's and ComfyUI's users mark v-prediction and zero terminal SNR. The `family` is by
    default that of `model`. Raises ModelError.
    """
    model = ModelConfig() if model is None else model
    marks: dict[str, Any] = {}
    for name in dict.fromkeys((model.path if path is None else str(path), model.path)):
        if is_training_checkpoint(name):
            continue
        marks |= _scheduler_marks(name)
        scheduler = None
        if name == TINY and is_tiny(name, family or family_of(model)[0]):
            scheduler = tiny_part("scheduler")
        elif (folder := _scheduler_folder(name, model)) is not None:
            scheduler = _scheduler_from(name, folder)
        if scheduler is not None:
            return type(scheduler).from_config(scheduler.config, **marks) if marks else scheduler
    raise refused(
        "scheduler",
        f"neither {name if path is None else path} nor model.path ({model.path}) has a {_FILE}. Name a whole "
        "diffusers folder as model.path, or as model.config of a checkpoint.",
    )


def _scheduler_folder(name: str, model: ModelConfig) -> Path | None:
    """The folder with the scheduler's config that belongs to this name, or None."""
    if os.path.isdir(name) or not is_checkpoint("scheduler", name):
        revision = model.revision if name == model.path else None
        folder = local_folder("scheduler", name, [_FILE], revision=revision)[1]
    elif name == model.path:
        folder = config_folder(model.path, model.config, [_FILE])[0]
    else:
        return None
    return folder / "scheduler" if (folder / _FILE).is_file() else None


def _scheduler_marks(name: str) -> dict[str, Any]:
    """Settings of the scheduler that a checkpoint file itself states."""
    if not os.path.isfile(name) or not is_checkpoint("scheduler", name):
        return {}
    state = read_file("scheduler", name)
    if "v_pred" not in state:
        return {}
    marks: dict[str, Any] = {"prediction_type": "v_prediction"}
    if "ztsnr" in state:
        # "trailing" because only then sampling begins where nothing but noise is left (Lin et al., 2305.08891).
        marks |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    logger.info("scheduler: %s is marked as v_pred: %s", name, marks)
    return marks


def _scheduler_from(name: str, folder: Path) -> Any:
    # One class reads the settings of all: they share the file's name.
    settings = read_config("scheduler", folder, diffusers.EulerDiscreteScheduler, name)
    class_name = settings.get("_class_name")
    found: Any = getattr(diffusers, str(class_name), None)
    if not (isinstance(found, type) and issubclass(found, diffusers.SchedulerMixin)):
        raise refused(
            "scheduler",
            f"{folder} names the class {class_name!r}, which is no scheduler of diffusers {diffusers.__version__}. "
            "Correct _class_name in its scheduler_config.json.",
        )
    scheduler_class: Any = found
    with loading("scheduler", name):
        return scheduler_class.from_config(settings)
