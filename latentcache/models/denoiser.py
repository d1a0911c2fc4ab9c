"""Loading the denoiser and the scheduler of a model of any family, for validation and training.

diffusers' `from_single_file` and `from_pretrained` add or drop weights with a warning at most. Here every tensor of
the denoiser must come from the file, and every denoiser tensor in the file must be used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights

from latentcache.checkpoints.checkpoint import is_training_checkpoint, read_checkpoint
from latentcache.config import ModelConfig
from latentcache.errors import CheckpointError
from latentcache.families import family_named
from latentcache.families.base import Family
from latentcache.families.parts import class_named
from latentcache.models.files import (
    TINY,
    check_package,
    config_folder,
    family_of,
    is_checkpoint,
    is_tiny,
    load_pretrained,
    loading,
    local_folder,
    local_part,
    read_config,
    refused,
)
from latentcache.models.lora import SETTINGS_KEY, add_adapters, is_lora
from latentcache.models.model_loader import ModelOrigin, find_model
from latentcache.models.part_identity import weights_digest
from latentcache.models.single_file import State, converted, empty, fill, read_file
from latentcache.models.tiny import tiny_denoiser, tiny_part

ORIGINAL_PREFIX = "model.diffusion_model."
"""Name prefix of a denoiser's tensors in a whole model of the original layout (Stability, kohya, ComfyUI)."""

logger = logging.getLogger("latentcache")

_SCHEDULER_FILE = "scheduler/scheduler_config.json"
_PEFT_PREFIX = "base_model.model."
"""Name prefix added by peft's wrapper (`get_peft_model`)."""
_PEFT_MARKS = (".lora_", ".base_layer.", ".modules_to_save.", ".original_module.")
_SCALES = ("scaled_fp8", ".scale_weight", ".weight_scale", ".comfy_quant", ".absmax")
"""Markers in the names of a quantised weight's extra tensors, as written by ComfyUI and bitsandbytes."""


def load_denoiser(
    path: str | Path | None = None,
    *,
    dtype: torch.dtype,
    model: ModelConfig | None = None,
    family: Family | None = None,
) -> Any:
    """The denoiser at `path`, in `dtype`, on the CPU, frozen and in eval mode.

    `path` is `tiny`; a diffusers folder (its `unet/` or `transformer/`); a denoiser's own folder; a .safetensors file
    in the original layout or with diffusers' names; a file of `save_checkpoint` (its model part, with the LoRA
    adapters that its `extra` describes, see `lora_settings`); or a hub id. Default: `model.path`. `family` defaults to
    that of `model`.

    A weights file takes its architecture from a config.json next to it, else from `model`: `model.config`, or the
    denoiser of `model.path`. `model.denoiser` names the subfolder of a diffusers folder. `model.revision` and
    `model.variant` apply to `model.path` only. ModelError for pickles, for weights that are missing, unexpected or of
    another shape, for a denoiser of another family, and for a missing package.
    """
    model = ModelConfig() if model is None else model
    name, family = model.path if path is None else os.path.expanduser(path), family or family_of(model)[0]
    check_package(family.denoiser, family.denoiser_class, family.denoiser_needs)
    denoiser = _load(family, model, name, dtype)
    if family.whole is not None:
        _put_beside(denoiser, family, family_named(family.whole), name, model)
    if name != model.path or model.denoiser is not None:
        _check_shared(denoiser, family, name, model)
    return denoiser.eval().requires_grad_(False)


def _load(family: Family, model: ModelConfig, name: str, dtype: torch.dtype) -> Any:
    part, subfolder, is_folder = family.denoiser, model.denoiser or family.denoiser, os.path.isdir(name)
    if is_tiny(name, family):
        return torch.nn.Module.to(tiny_denoiser(), dtype)
    if not is_folder and is_training_checkpoint(name):
        return _of_training_checkpoint(family, model, name, dtype)
    if not is_folder and is_checkpoint(part, name):
        return _of_file(family, model, Path(name), dtype)
    variant, revision = (model.variant, model.revision) if name == model.path else (None, None)
    folder = local_part(subfolder, name, variant, revision)[1]
    _settings_in(folder, family)
    denoiser, unexpected = load_pretrained(part, class_named(family.denoiser_class), folder, variant, dtype)
    if unexpected:
        met = f"{folder} has {len(unexpected)} weights that do not fit its config.json, e.g. {unexpected[0]}"
        raise refused(part, f"{met}. Use a folder written by save_pretrained.")
    return denoiser


def _of_training_checkpoint(family: Family, model: ModelConfig, name: str, dtype: torch.dtype) -> Any:
    """The denoiser in a checkpoint's model part: the whole part, or the module with the denoiser's name."""
    part, word = family.denoiser, family.denoiser_word
    try:
        parts = read_checkpoint(Path(name))["parts"]
    except CheckpointError as error:
        raise refused(part, str(error)) from error
    saved, extra, prefix = parts["model"], parts["extra"], f"{part}."
    denoiser = empty(class_named(family.denoiser_class), _architecture(family, model))
    state = {key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)}
    names = sorted({key.split(".", 1)[0] for key in saved})
    if state and names != [part]:
        others = ", ".join(each for each in names if each != part)
        logger.warning("%s: only its %s is loaded, not its %s", name, part, others)
    state = {key.removeprefix(_PEFT_PREFIX): value for key, value in (state or saved).items()}
    if state.keys().isdisjoint(denoiser.state_dict()):
        met = f"the model part of {name} holds {', '.join(names[:8]) or 'nothing'}, but no {word}"
        raise refused(part, f"{met}. Save one as model={part}, or as model={{{part!r}: {part}, ...}}.")
    if any(mark in key for key in state for mark in _PEFT_MARKS):
        adapters = extra.get(SETTINGS_KEY) if isinstance(extra, Mapping) else None
        if not isinstance(adapters, Mapping):
            raise refused(
                part,
                f"{name} holds a {word} with LoRA weights, but not the settings that these need (alpha, rank, "
                f"targets). Save it with extra={{{SETTINGS_KEY!r}: lora_settings({part})}}.",
            )
        with init_empty_weights(include_buffers=False):
            add_adapters(denoiser, adapters)
    _fill(family, denoiser, state, dtype, name)
    return denoiser


def _of_file(family: Family, model: ModelConfig, file: Path, dtype: torch.dtype) -> Any:
    """The denoiser from a whole model's file in the original layout, or from its own file in either layout."""
    part, state = family.denoiser, read_file(family.denoiser, file)
    if all(map(is_lora, state)):
        raise refused(part, f"{file} is a LoRA. Pass it as the LoRA, and its base model as the denoiser.")
    if scaled := next((key for key in state if key.endswith(_SCALES)), None):
        raise refused(
            part,
            f"the weights of {file} are quantised with separate scales ({scaled}), which diffusers cannot read. Use "
            f"the same {family.denoiser_word} in bfloat16 or float16, or in float8 without scales.",
        )
    original = {key: value for key, value in state.items() if key.startswith(ORIGINAL_PREFIX)}
    has_config = not original and (file.parent / "config.json").is_file()
    settings = _settings_in(file.parent, family) if has_config else _architecture(family, model)
    denoiser = empty(class_named(family.denoiser_class), settings)
    names = denoiser.state_dict().keys()
    # The layouts may share more than half of their names; a file with diffusers' names has nearly all of them.
    if original or len(names & state.keys()) < 0.9 * len(names):
        inside = {each: described.inside for each, described in family.parts.items() if described.inside is not None}
        if str(file) != model.path and any(first in key for first in inside.values() for key in state):
            met = f"its {', '.join(inside)} is not used: cached texts were made with that of model.path"
            logger.warning("%s: %s. If they differ, set model.path to this file and run precache", file, met)
        state = _converted(family, original or state, settings, str(file))
    _fill(family, denoiser, state, dtype, str(file))
    return denoiser


def _converted(family: Family, original: State, settings: Mapping[str, Any], name: str) -> dict[str, torch.Tensor]:
    """Weights in the original layout, converted to diffusers' names. ModelError if any are lost."""
    class_name = family.denoiser_class.rpartition(".")[2]
    if family.denoiser != "unet":  # a UNet's conversion needs the prefix, others work without
        original = {key.removeprefix(ORIGINAL_PREFIX): value for key, value in original.items()}
    original = {key: value for key, value in original.items() if not key.startswith(family.unused_weights)}
    state = converted(family.denoiser, class_name, original, settings, name)
    # Conversion renames, splits and joins tensors, so only the total number of values is invariant.
    given, placed = (sum(value.numel() for value in each.values()) for each in (original, state))
    if given != placed:
        met = f"the {len(original)} {family.denoiser_word} tensors of {name} have {given} values"
        step = f"Name a checkpoint of {family.name}"
        raise refused(family.denoiser, f"{met}, of which diffusers converts {placed} to a {class_name}. {step}.")
    return dict(state)


def _fill(family: Family, denoiser: Any, state: State, dtype: torch.dtype, name: str) -> None:
    step = f"Name a complete {family.denoiser_word} of the model in model.path, or set model.config to its configs"
    fill(family.denoiser, denoiser, state, dtype, name, step)


def _architecture(family: Family, model: ModelConfig) -> Mapping[str, Any]:
    """The config of the model's denoiser, for weights without their own."""
    if model.config is None and is_tiny(model.path, family):
        return dict(tiny_denoiser().config)
    part = model.denoiser or family.denoiser
    folder, _ = config_folder(model.path, model.config, [f"{part}/config.json"], model.revision)
    return _settings_in(folder / part, family)


def _settings_in(folder: Path, family: Family) -> Mapping[str, Any]:
    """The settings in a denoiser's config.json. ModelError if they are not the family's."""
    model_class = class_named(family.denoiser_class)
    settings = read_config(family.denoiser, folder, model_class)
    wanted = model_class.__name__
    class_name = settings.get("_class_name", wanted)
    met = f"is a {class_name}" if class_name != wanted else family.check_settings(settings)
    if met is not None:
        raise refused(family.denoiser, f"{folder} {met}. Name a {wanted} of {family.name}.")
    return settings


def _put_beside(denoiser: Any, family: Family, whole: Family, name: str, model: ModelConfig) -> None:
    """Attach the whole family's further parts to the denoiser: from its file, folder or hub id, else the model's.

    They are attributes, not submodules: checkpoints and LoRAs cover only the denoiser.
    """
    for part in (each for each in whole.parts if each not in family.parts):
        origin = None
        if name == model.path or is_training_checkpoint(name):
            pass
        elif not os.path.isfile(name):
            found, folder = local_folder(part, name, [f"{part}/*"])
            origin = ModelOrigin(found, whole, {part: folder / part}) if (folder / part).is_dir() else None
        elif any(str(whole.parts[part].inside) in key for key in read_file(part, name)):
            origin = find_model(whole, name, model.config or model.path, None, None)
        origin = origin or find_model(whole, model.path, model.config, model.variant, model.revision)
        denoiser.__dict__[part] = origin.load(part, denoiser.dtype)[part]
        logger.info("%s: loaded from %s", part, origin.name)


def _check_shared(denoiser: Any, family: Family, name: str, model: ModelConfig) -> None:
    """ModelError if weights that the denoiser shares with a text-encoding part differ from the model's."""
    for part, described in family.parts.items():
        if described.folder != family.denoiser:
            continue
        origin = find_model(family, model.path, model.config, model.variant, model.revision)
        own = origin.load(part, denoiser.dtype)[part]
        found, wanted = (weights_digest(part, each, denoiser.dtype, described.weights) for each in (denoiser, own))
        if found != wanted:
            raise refused(
                family.denoiser,
                f"the {part} of {name} differs from that of {origin.name}, with which texts are cached. Set model.path "
                f"to a whole model with this {family.denoiser_word}, and run precache.",
            )


def check_fits(denoiser: Any, family: Family, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """ModelError if the denoiser does not take cached fields of these shapes."""
    for name, text in family.fields.items():
        if text.width and name in shapes and shapes[name][-1] != (wanted := text.width_in(denoiser.config)):
            met = f"takes {name} of width {wanted}, but the cache has {shapes[name][-1]}"
            raise refused(family.denoiser, f"{met}. Use a {family.denoiser_word} of the model that made the cache.")


def load_scheduler(
    path: str | Path | None = None, *, model: ModelConfig | None = None, family: Family | None = None
) -> Any:
    """A new scheduler with the class and settings in the model's scheduler_config.json.

    A whole diffusers folder or hub id at `path` has its own. Anything else (a denoiser alone, a training checkpoint)
    takes that of `model`; for a single-file model it comes from its configs. The marker tensors `v_pred` and `ztsnr`
    in such a file, a convention of kohya and ComfyUI for v-prediction and zero terminal SNR, override it. `family`
    defaults to that of `model`. Raises ModelError.
    """
    model = ModelConfig() if model is None else model
    marks: dict[str, Any] = {}
    for name in dict.fromkeys((model.path if path is None else os.path.expanduser(path), model.path)):
        if is_training_checkpoint(name):
            continue
        if name == TINY and is_tiny(name, family or family_of(model)[0]):
            scheduler = tiny_part("scheduler")
        elif (folder := _scheduler_folder(name, model, marks)) is None:
            continue
        else:
            # Any scheduler class reads the config: they all use the same file name.
            settings = read_config("scheduler", folder, diffusers.EulerDiscreteScheduler, name)
            with loading("scheduler", name):
                scheduler_class: Any = getattr(diffusers, str(settings.get("_class_name")))
                if not issubclass(scheduler_class, diffusers.SchedulerMixin):
                    raise TypeError(f"{scheduler_class.__name__} is not a diffusers scheduler")
                scheduler = scheduler_class.from_config(settings)
        return type(scheduler).from_config(scheduler.config, **marks) if marks else scheduler
    raise refused(
        "scheduler",
        f"neither {name if path is None else path} nor model.path ({model.path}) has a {_SCHEDULER_FILE}. Set "
        "model.path to a whole diffusers folder, or model.config for a single file.",
    )


def _scheduler_folder(name: str, model: ModelConfig, marks: dict[str, Any]) -> Path | None:
    """The folder with this model's scheduler config, or None. Settings marked in a model file are added to `marks`."""
    if os.path.isdir(name) or not is_checkpoint("scheduler", name):
        revision = model.revision if name == model.path else None
        folder = local_folder("scheduler", name, [_SCHEDULER_FILE], revision=revision)[1]
        return folder / "scheduler" if (folder / _SCHEDULER_FILE).is_file() else None
    state = read_file("scheduler", name)
    if "v_pred" in state:
        marks["prediction_type"] = "v_prediction"
        if "ztsnr" in state:
            # Only "trailing" starts sampling from pure noise (Lin et al., 2305.08891).
            marks |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
        logger.info("scheduler: %s is marked as v_pred: %s", name, marks)
    if name != model.path:
        return None
    folder = config_folder(name, model.config, [_SCHEDULER_FILE])[0]
    return folder / "scheduler" if (folder / _SCHEDULER_FILE).is_file() else None
