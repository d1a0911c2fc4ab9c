"""The denoiser and the scheduler of a model of any family, for validation and training: filling a cache needs none.

diffusers' `from_single_file` and `from_pretrained` fill in or leave out weights with a warning at most. Here every
tensor of the denoiser comes from the file, and every tensor of the file's denoiser has its place.
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
from latentcache.errors import CheckpointError, ModelError
from latentcache.families import family_named
from latentcache.families.base import Family, class_named
from latentcache.models.family import family_of
from latentcache.models.files import (
    TINY,
    check_package,
    config_folder,
    has_weights,
    is_checkpoint,
    is_tiny,
    load_pretrained,
    loading,
    local_folder,
    local_part,
    part_folder,
    read_config,
    refused,
    weights_name,
)
from latentcache.models.lora import LORA_FILE, SETTINGS_KEY, add_adapters, is_lora
from latentcache.models.model_loader import ModelOrigin, find_model
from latentcache.models.part_identity import weights_digest
from latentcache.models.single_file import State, converted, empty, fill, read_file
from latentcache.models.tiny import tiny_denoiser, tiny_part

ORIGINAL_PREFIX = "model.diffusion_model."
"""The first part of a denoiser's names in a whole model of the original layout (Stability's, kohya's, ComfyUI's)."""

logger = logging.getLogger("latentcache")

_SCHEDULER_FILE = "scheduler/scheduler_config.json"
_PEFT_PREFIX = "base_model.model."
"""What peft's own wrapper (`get_peft_model`) puts before a module's names."""
_PEFT_MARKS = (".lora_", ".base_layer.", ".modules_to_save.", ".original_module.")
_SCALES = ("scaled_fp8", ".scale_weight", ".weight_scale", ".comfy_quant", ".absmax")
"""How the names of a quantised weight's further tensors end, as ComfyUI and bitsandbytes write them."""


def load_denoiser(
    path: str | Path | None = None,
    *,
    dtype: torch.dtype,
    model: ModelConfig | None = None,
    family: Family | None = None,
) -> Any:
    """The denoiser at `path`, in `dtype`, on the CPU, frozen and in eval mode.

    `path` is `tiny`; a diffusers folder (its `unet/` or `transformer/`); a denoiser's own folder; a .safetensors file,
    in the original layout or with diffusers' names; a file of `save_checkpoint` (its model part, with the LoRA
    adapters whose settings its `extra` holds, see `lora_settings`); or a hub id. Default: `model.path`. The `family` is
    by default that of `model`.

    Weights alone take their architecture from a config.json next to them, else from `model`: `model.config`, or the
    denoiser of `model.path`. `model.denoiser` names its folder in a diffusers folder. `model.revision` counts for
    `model.path`; so does `model.variant`, and for a local folder that has it. ModelError for pickles, for weights that
    are missing, left over or of another shape, for a denoiser of another family, and for a package that it lacks.
    """
    model = ModelConfig() if model is None else model
    name, family = model.path if path is None else str(path), family or family_of(model)[0]
    check_package(family.denoiser, family.denoiser_class, family.denoiser_needs)
    denoiser = _Denoisers(family, model, dtype).load(name)
    if family.whole is not None:
        _put_beside(denoiser, family, family_named(family.whole), name, model)
    if name != model.path or model.denoiser is not None:
        _check_shared(denoiser, family, name, model)
    return denoiser.eval().requires_grad_(False)


def _put_beside(denoiser: Any, family: Family, whole: Family, name: str, model: ModelConfig) -> None:
    """Set these parts of the whole family as attributes: of the denoiser's file, folder or hub id, else the model's.

    They are no submodules: checkpoints and LoRAs are of the denoiser alone.
    """
    for part in (each for each in whole.parts if each not in family.parts):
        origin = None
        if name != model.path and not is_training_checkpoint(name):
            if os.path.isfile(name):
                inside = str(whole.parts[part].inside)
                if any(inside in key for key in read_file(part, name)):
                    origin = find_model(whole, name, model.config or model.path, None, None)
            else:
                found, folder = local_folder(part, name, [f"{part}/*"])
                origin = ModelOrigin(found, whole, folder) if (folder / part).is_dir() else None
        origin = origin or find_model(whole, model.path, model.config, model.variant, model.revision)
        denoiser.__dict__[part] = origin.load(part, denoiser.dtype)[part].eval().requires_grad_(False)
        logger.info("%s: that of %s", part, origin.name)


def _check_shared(denoiser: Any, family: Family, name: str, model: ModelConfig) -> None:
    """ModelError unless the denoiser has those weights of the model that are a part of the family: texts show them."""
    for part, described in family.parts.items():
        if described.folder != family.denoiser:
            continue
        origin = find_model(family, model.path, model.config, model.variant, model.revision)
        own = origin.load(part, denoiser.dtype)[part]
        found, wanted = (weights_digest(part, each, denoiser.dtype, described.weights) for each in (denoiser, own))
        if found != wanted:
            raise refused(
                family.denoiser,
                f"{name} has another {part} than {origin.name}, with which texts are cached. Name a whole model with "
                f"this {family.denoiser_word} as model.path, and run precache.",
            )


def check_fits(denoiser: Any, family: Family, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """ModelError unless the denoiser takes cached fields of these shapes."""
    for name, text in family.fields.items():
        if text.width and name in shapes and shapes[name][-1] != (wanted := text.width_in(denoiser.config)):
            met = f"takes {name} of width {wanted}, but the cache has {shapes[name][-1]}"
            raise refused(family.denoiser, f"{met}. Name a {family.denoiser_word} of the model that made the cache.")


class _Denoisers:
    """Loads denoisers of a family, in `dtype`. `model` is what weights alone take their architecture from."""

    def __init__(self, family: Family, model: ModelConfig, dtype: torch.dtype):
        self.family, self.model, self.dtype = family, model, dtype
        self.part, self.word = family.denoiser, family.denoiser_word
        self.subfolder = model.denoiser or family.denoiser
        self.model_class = class_named(family.denoiser_class)

    def load(self, name: str) -> Any:
        if is_tiny(name, self.family):
            return torch.nn.Module.to(tiny_denoiser(), self.dtype)
        if os.path.isdir(name):
            return self._from_folder(Path(name))
        if is_training_checkpoint(name):
            return self._from_training_checkpoint(Path(name))
        if is_checkpoint(self.part, name):
            return self._from_file(Path(name))
        is_model, subfolder = name == self.model.path, self.subfolder
        variant, revision = (self.model.variant, self.model.revision) if is_model else (None, None)
        folder = local_part(subfolder, name, variant, revision)[1]
        return self._from_own_folder(part_folder(folder, subfolder), variant)

    # A folder: a diffusers model, or a denoiser alone.

    def _from_folder(self, folder: Path) -> Any:
        if (folder / LORA_FILE).is_file():
            raise self._lora_refused(folder)
        own = part_folder(folder, self.subfolder)
        if not (own / "config.json").is_file():
            raise self._refused(
                f"{own} has no config.json. Name a diffusers folder with {self.subfolder}/, a {self.word}'s own folder "
                f"with config.json and {weights_name(self.part)}.safetensors, or a file of save_checkpoint."
            )
        variant = self.model.variant
        has_variant = str(folder) == self.model.path or (variant and has_weights(self.part, own, variant))
        return self._from_own_folder(own, variant if has_variant else None)

    def _from_own_folder(self, folder: Path, variant: str | None) -> Any:
        self._read_settings(folder)
        denoiser, unexpected = load_pretrained(self.part, self.model_class, folder, variant, self.dtype)
        if unexpected:
            raise self._refused(
                f"{folder} has {len(unexpected)} weights that its config.json has no place for, e.g. "
                f"{unexpected[0]}. Use a folder written by save_pretrained."
            )
        return denoiser

    # A file of save_checkpoint.

    def _from_training_checkpoint(self, file: Path) -> Any:
        """The denoiser of the checkpoint's model part: the whole part, or the module of its name of several."""
        try:
            parts = read_checkpoint(file)["parts"]
        except CheckpointError as error:
            raise self._refused(str(error)) from error
        saved, extra = parts["model"], parts["extra"]
        denoiser = empty(self.model_class, self._architecture())
        state = self._own_weights(saved, file, denoiser)
        if any(mark in key for key in state for mark in _PEFT_MARKS):
            adapters = extra.get(SETTINGS_KEY) if isinstance(extra, Mapping) else None
            if not isinstance(adapters, Mapping):
                raise self._refused(
                    f"{file} holds a {self.word} with LoRA weights, but not their settings (alpha, rank, targets), "
                    f"without which the weights mean nothing. Save it with extra={{{SETTINGS_KEY!r}: "
                    f"lora_settings({self.part})}}, or write the LoRA with {self.family.pipeline_name}."
                    "save_lora_weights and name that file as the LoRA."
                )
            with init_empty_weights(include_buffers=False):
                add_adapters(denoiser, adapters)
        self._fill(denoiser, state, str(file))
        return denoiser

    def _own_weights(self, model: State, file: Path, denoiser: torch.nn.Module) -> State:
        """The denoiser's weights in a checkpoint's model part, by its own names."""
        prefix = f"{self.part}."
        state = {key.removeprefix(prefix): value for key, value in model.items() if key.startswith(prefix)}
        others = sorted({key.split(".", 1)[0] for key in model if not key.startswith(prefix)})
        if state and others:
            logger.warning("%s: only its %s is loaded, not its %s", file, self.part, ", ".join(others))
        state = {key.removeprefix(_PEFT_PREFIX): value for key, value in (state or model).items()}
        if state.keys().isdisjoint(denoiser.state_dict()):
            names = ", ".join(sorted({key.split(".", 1)[0] for key in model})[:8]) or "nothing"
            raise self._refused(
                f"the model part of {file} holds {names}, but no {self.word}. Save one as model={self.part}, or as "
                f"model={{{self.part!r}: {self.part}, ...}}."
            )
        return state

    # One file: a whole model in the original layout, or a denoiser by diffusers' names or by the original ones.

    def _from_file(self, file: Path) -> Any:
        state: State = read_file(self.part, file)
        if is_lora(state):
            raise self._lora_refused(file)
        original = {key: value for key, value in state.items() if key.startswith(ORIGINAL_PREFIX)}
        if scaled := next((key for key in state if key.endswith(_SCALES)), None):
            raise self._refused(
                f"the weights of {file} are quantised, with scales of their own ({scaled}), and diffusers cannot read "
                f"that. Name the same {self.word} in bfloat16 or float16, or in float8 without scales."
            )
        has_config = not original and (file.parent / "config.json").is_file()
        settings = self._read_settings(file.parent) if has_config else self._architecture()
        denoiser = empty(self.model_class, settings)
        names = denoiser.state_dict().keys()
        # Both layouts may share more than half of their names. A file by diffusers' names has nearly all of them.
        if original or len(names & state.keys()) < 0.9 * len(names):
            state = self._converted(original or state, settings, str(file))
        self._fill(denoiser, state, str(file))
        return denoiser

    def _converted(self, original: State, settings: Mapping[str, Any], name: str) -> State:
        """Weights of the original layout by diffusers' names. ModelError if the conversion leaves out any."""
        class_name = self.model_class.__name__
        if self.part != "unet":  # whose conversion needs the prefix; that of others takes both, or only bare names
            original = {key.removeprefix(ORIGINAL_PREFIX): value for key, value in original.items()}
        unused = self.family.unused_weights
        inside = {part: each.inside for part, each in self.family.parts.items() if each.inside is not None}
        if name != self.model.path and any(first in key for first in inside.values() for key in original):
            met = f"its {', '.join(inside)} is not used: cached texts are made with that of model.path"
            logger.warning("%s: %s. If they differ, name the file as model.path and run precache", name, met)
        original = {key: value for key, value in original.items() if not key.startswith(unused)}
        state = converted(self.part, class_name, original, settings, name)
        # It renames, splits and joins tensors, so that only the sum of their numbers stays.
        given, placed = (sum(value.numel() for value in each.values()) for each in (original, state))
        if given != placed:
            raise self._refused(
                f"{name} has {given} numbers in the {len(original)} tensors of its {self.word}, of which diffusers "
                f"places {placed} in a {class_name}. Name a checkpoint of {self.family.name}."
            )
        return state

    def _fill(self, denoiser: Any, state: State, name: str) -> None:
        step = f"Name a complete {self.word} of the model in model.path, or that model's configs as model.config"
        fill(self.part, denoiser, state, self.dtype, name, step)

    # What a denoiser is, by its config or its names.

    def _architecture(self) -> Mapping[str, Any]:
        """The settings of the model's denoiser: those that weights without a config must fit."""
        model, part = self.model, self.subfolder
        if model.config is None and is_tiny(model.path, self.family):
            return dict(tiny_denoiser().config)
        folder, _ = config_folder(model.path, model.config, [f"{part}/config.json"], model.revision)
        if not (folder / part / "config.json").is_file():
            raise self._refused(
                f"{folder} has no {part}/config.json, which weights without a config of their own need. "
                f"Set model.config to the diffusers folder or hub id of a model of {self.family.name}."
            )
        return self._read_settings(folder / part)

    def _read_settings(self, folder: Path) -> Mapping[str, Any]:
        """The settings in a denoiser's config.json. ModelError unless they are those of the family's."""
        wanted = self.model_class.__name__
        settings = read_config(self.part, folder, self.model_class)
        class_name = settings.get("_class_name", wanted)
        met = f"is a {class_name}" if class_name != wanted else self.family.check_settings(settings)
        if met is not None:
            raise self._refused(f"{folder} {met}. Name a {wanted} of {self.family.name}.")
        return settings

    def _refused(self, message: str) -> ModelError:
        return refused(self.part, message)

    def _lora_refused(self, path: Path) -> ModelError:
        return self._refused(
            f"{path} is a LoRA, which changes a {self.word} but is none. Name it as the LoRA, and the {self.word} that "
            f"it was trained on as the {self.word}."
        )


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
        f"neither {name if path is None else path} nor model.path ({model.path}) has a {_SCHEDULER_FILE}. Name a whole "
        "diffusers folder as model.path, or as model.config of a checkpoint.",
    )


def _scheduler_folder(name: str, model: ModelConfig) -> Path | None:
    """The folder with the scheduler's config that belongs to this name, or None."""
    if os.path.isdir(name) or not is_checkpoint("scheduler", name):
        revision = model.revision if name == model.path else None
        folder = local_folder("scheduler", name, [_SCHEDULER_FILE], revision=revision)[1]
    elif name == model.path:
        folder = config_folder(model.path, model.config, [_SCHEDULER_FILE])[0]
    else:
        return None
    return folder / "scheduler" if (folder / _SCHEDULER_FILE).is_file() else None


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
    with loading("scheduler", name):
        scheduler_class: Any = getattr(diffusers, str(settings.get("_class_name")))
        if not issubclass(scheduler_class, diffusers.SchedulerMixin):
            raise TypeError(f"{scheduler_class.__name__} is no scheduler of diffusers")
        return scheduler_class.from_config(settings)
