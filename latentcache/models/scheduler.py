"""The noise scheduler that belongs to a model, as its scheduler_config.json or its checkpoint file states it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import diffusers
from diffusers.loaders.single_file_utils import load_single_file_checkpoint

from latentcache.config import ModelConfig
from latentcache.errors import ModelError
from latentcache.models.model_files import TINY, config_folder, download, is_checkpoint, loading, read_config
from latentcache.models.tiny import tiny_pipeline

logger = logging.getLogger("latentcache")

_CONFIG_FILE = "scheduler/scheduler_config.json"


def load_scheduler(path: str | Path | None = None, *, model: ModelConfig | None = None) -> Any:
    """A new scheduler, of the class and settings that the model's scheduler_config.json states.

    A whole diffusers folder or hub id at `path` has its own. Everything else (a UNet alone, a checkpoint) has none, and
    takes that of `model`; a checkpoint file's is that of its configs. The tensors `v_pred` and `ztsnr` in such a file
    overrule it: by them kohya's and ComfyUI's users mark v-prediction and zero terminal SNR. Raises ModelError.
    """
    model = ModelConfig() if model is None else model
    marks: dict[str, Any] = {}
    for name in dict.fromkeys((model.path if path is None else str(path), model.path)):
        marks |= _marks_in_file(name)
        scheduler = None
        if name == TINY:
            scheduler = tiny_pipeline().scheduler
        elif (folder := _folder_of(name, model)) is not None:
            scheduler = _from_config(name, folder)
        if scheduler is not None:
            return type(scheduler).from_config(scheduler.config, **marks) if marks else scheduler
    raise ModelError(
        f"scheduler: neither {name if path is None else path} nor model.path ({model.path}) has a {_CONFIG_FILE}. "
        "Name a whole diffusers folder as model.path, or as model.config of a checkpoint.",
        part="scheduler",
    )


def _folder_of(name: str, model: ModelConfig) -> Path | None:
    """The folder with the scheduler's config that belongs to this name, or None."""
    if os.path.isdir(name):
        folder = Path(name)
    elif not is_checkpoint("scheduler", name):
        folder = download("scheduler", name, [_CONFIG_FILE])
    elif name == model.path:
        folder = config_folder(model.path, model.config, [_CONFIG_FILE])[0]
    else:
        return None
    return folder / "scheduler" if (folder / _CONFIG_FILE).is_file() else None


def _marks_in_file(name: str) -> dict[str, Any]:
    """Settings of the scheduler that a checkpoint file itself states."""
    if not os.path.isfile(name) or not is_checkpoint("scheduler", name):
        return {}
    with loading("scheduler", name):
        state = load_single_file_checkpoint(name)
    if "v_pred" not in state:
        return {}
    marks: dict[str, Any] = {"prediction_type": "v_prediction"}
    if "ztsnr" in state:
        # "trailing" because only then sampling begins where nothing but noise is left (Lin et al., 2305.08891).
        marks |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    logger.info("scheduler: %s is marked as v_pred: %s", name, marks)
    return marks


def _from_config(name: str, folder: Path) -> Any:
    # One class reads the settings of all: they share the file's name.
    settings = read_config("scheduler", folder, diffusers.EulerDiscreteScheduler, name)
    class_name = settings.get("_class_name")
    found: Any = getattr(diffusers, str(class_name), None)
    if not (isinstance(found, type) and issubclass(found, diffusers.SchedulerMixin)):
        raise ModelError(
            f"scheduler: {folder} names the class {class_name!r}, which is no scheduler of diffusers "
            f"{diffusers.__version__}. Correct _class_name in its scheduler_config.json.",
            part="scheduler",
        )
    scheduler_class: Any = found
    with loading("scheduler", name):
        return scheduler_class.from_config(settings)
