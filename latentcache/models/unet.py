"""The UNet of an SDXL model and its scheduler, for validation and training. Filling a cache needs neither.

diffusers' `from_single_file` and `from_pretrained` fill in or leave out weights with a warning at most. Here every
tensor of the UNet comes from the file, and every tensor of the file's UNet has its place.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers import UNet2DConditionModel
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint, load_single_file_checkpoint

from latentcache.checkpoints.folder import DOCUMENT, read_document, read_tensors
from latentcache.checkpoints.state_codec import unpack
from latentcache.config import ModelConfig
from latentcache.errors import CheckpointError, ModelError
from latentcache.families import DEFAULT, family_named
from latentcache.models.lora import LORA_FILE, SETTINGS_KEY, add_adapters, is_lora
from latentcache.models.model_files import (
    TINY,
    config_folder,
    has_weights,
    is_checkpoint,
    load_pretrained,
    loading,
    local_folder,
    local_part,
    part_folder,
    read_config,
    refused,
    weights_name,
)
from latentcache.models.tiny import tiny_denoiser, tiny_pipeline

LATENT_CHANNELS = family_named(DEFAULT).latent.channels
ORIGINAL_PREFIX = "model.diffusion_model."
"""The first part of a UNet's names in a checkpoint of the original layout (Stability's, kohya's, ComfyUI's)."""

logger = logging.getLogger("latentcache")

_SCHEDULER_FILE = "scheduler/scheduler_config.json"
_PEFT_PREFIX = "base_model.model."
"""What peft's own wrapper (`get_peft_model`) puts before a module's names."""
_PEFT_MARKS = (".lora_", ".base_layer.", ".modules_to_save.", ".original_module.")
_State: TypeAlias = "Mapping[str, torch.Tensor]"


def load_unet(
    path: str | Path | None = None, *, dtype: torch.dtype, model: ModelConfig | None = None
) -> UNet2DConditionModel:
    """The UNet at `path`, in `dtype`, on the CPU, frozen and in eval mode.

    `path` is `tiny`; a diffusers folder (its `unet/`); a UNet's own folder; a .safetensors file, in the original SDXL
    layout or with diffusers' names; a checkpoint folder of `save_checkpoint` (its model part, with the LoRA adapters
    whose settings its `extra` holds, see `lora_settings`); or a hub id. Default: `model.path`.

    Weights alone take their architecture from a config.json next to them, else from `model`: `model.config`, or the
    UNet of `model.path`. `model.variant` counts for `model.path`, and for a local folder that has it. ModelError for
    pickles, for weights that are missing, left over or of another shape, and for a UNet that is not SDXL's.
    """
    model = ModelConfig() if model is None else model
    name = model.path if path is None else str(path)
    if name == TINY:
        unet = torch.nn.Module.to(tiny_denoiser(), dtype)
    elif os.path.isdir(name):
        unet = _from_folder(Path(name), dtype, model, is_model=name == model.path)
    elif is_checkpoint("unet", name):
        unet = _from_file(Path(name), dtype, model)
    else:
        variant = model.variant if name == model.path else None
        unet = _from_own_folder(part_folder(local_part("unet", name, variant)[1], "unet"), dtype, variant)
    return unet.eval().requires_grad_(False)


def check_conditioning(unet: UNet2DConditionModel, prompt_embeds_dim: int, pooled_dim: int) -> None:
    """ModelError unless the UNet takes prompt_embeds [B, 77, D] and pooled_prompt_embeds [B, P] of these D and P."""
    config = unet.config
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    if (config.cross_attention_dim, pooled) != (prompt_embeds_dim, pooled_dim):
        raise refused(
            "unet",
            f"takes prompt_embeds of width {config.cross_attention_dim} and pooled ones of width {pooled}, but "
            f"the cache has {prompt_embeds_dim} and {pooled_dim}. Name a UNet of the model that made the cache.",
        )


def load_scheduler(path: str | Path | None = None, *, model: ModelConfig | None = None) -> Any:
    """A new scheduler, of the class and settings that the model's scheduler_config.json states.

    A whole diffusers folder or hub id at `path` has its own. Everything else (a UNet alone, a checkpoint) has none, and
    takes that of `model`; a checkpoint file's is that of its configs. The tensors `v_pred` and `ztsnr` in such a file
    overrule it: by them kohya's and ComfyUI's users mark v-prediction and zero terminal SNR. Raises ModelError.
    """
    model = ModelConfig() if model is None else model
    marks: dict[str, Any] = {}
    for name in dict.fromkeys((model.path if path is None else str(path), model.path)):
        marks |= _scheduler_marks(name)
        scheduler = None
        if name == TINY:
            scheduler = tiny_pipeline().scheduler
        elif (folder := _scheduler_folder(name, model)) is not None:
            scheduler = _scheduler_from(name, folder)
        if scheduler is not None:
            return type(scheduler).from_config(scheduler.config, **marks) if marks else scheduler
    raise refused(
        "scheduler",
        f"neither {name if path is None else path} nor model.path ({model.path}) has a {_SCHEDULER_FILE}. Name a whole "
        "diffusers folder as model.path, or as model.config of a checkpoint.",
    )


# A folder: a checkpoint of a training run, a diffusers model, or a UNet alone.


def _from_folder(folder: Path, dtype: torch.dtype, model: ModelConfig, *, is_model: bool) -> UNet2DConditionModel:
    if (folder / DOCUMENT).is_file():
        return _from_training_checkpoint(folder, dtype, model)
    if (folder / LORA_FILE).is_file():
        raise _lora_refused(folder)
    own = part_folder(folder, "unet")
    if not (own / "config.json").is_file():
        raise refused(
            "unet",
            f"{own} has no config.json. Name a diffusers folder with unet/, a UNet's own folder with config.json "
            f"and {weights_name('unet')}.safetensors, or a checkpoint folder with {DOCUMENT}.",
        )
    has_variant = is_model or (model.variant and has_weights("unet", own, model.variant))
    return _from_own_folder(own, dtype, model.variant if has_variant else None)


def _from_own_folder(folder: Path, dtype: torch.dtype, variant: str | None) -> UNet2DConditionModel:
    _read_settings(folder)
    unet, unexpected = load_pretrained("unet", UNet2DConditionModel, folder, variant, dtype)
    if unexpected:
        raise refused(
            "unet",
            f"{folder} has {len(unexpected)} weights that its config.json has no place for, e.g. "
            f"{unexpected[0]}. Use a folder written by save_pretrained.",
        )
    return unet


def _from_training_checkpoint(folder: Path, dtype: torch.dtype, model: ModelConfig) -> UNet2DConditionModel:
    """The UNet of the checkpoint's model part: the whole part, or the module `unet` of several."""
    try:
        document = read_document(folder)
        saved, extra = (
            unpack(document["parts"][part], read_tensors(folder, document, part)) for part in ("model", "extra")
        )
    except CheckpointError as error:
        raise refused("unet", f"{error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise refused("unet", f"{folder} is not what latentcache writes: {error!r}. Save it again.") from error
    state = _unet_in(saved, folder)
    adapters = None
    if any(mark in key for key in state for mark in _PEFT_MARKS):
        adapters = extra.get(SETTINGS_KEY) if isinstance(extra, Mapping) else None
        if not isinstance(adapters, Mapping):
            raise refused(
                "unet",
                f"{folder} holds a UNet with LoRA weights, but not their settings (alpha, rank, targets), "
                f"without which the weights mean nothing. Save it with extra={{{SETTINGS_KEY!r}: lora_settings(unet)}},"
                " or write the LoRA with StableDiffusionXLPipeline.save_lora_weights and name that file as the LoRA.",
            )
    unet = _empty(_architecture(model))
    with init_empty_weights(include_buffers=False):
        add_adapters(unet, adapters)
    _fill(unet, state, str(folder), dtype)
    return unet


def _unet_in(model: _State, folder: Path) -> _State:
    """The UNet's own weights in a checkpoint's model part, by the UNet's own names."""
    state = {key.removeprefix("unet."): value for key, value in model.items() if key.startswith("unet.")}
    others = sorted({key.split(".", 1)[0] for key in model if not key.startswith("unet.")})
    if state and others:
        logger.warning("%s: only its unet is loaded, not its %s", folder, ", ".join(others))
    state = {key.removeprefix(_PEFT_PREFIX): value for key, value in (state or model).items()}
    if not any(key.startswith("conv_in.") for key in state):
        names = ", ".join(sorted({key.split(".", 1)[0] for key in model})[:8]) or "nothing"
        raise refused(
            "unet",
            f"the model part of {folder} holds {names}, but no UNet. Save one as model=unet, or as "
            "model={'unet': unet, ...}.",
        )
    return state


# One file: a whole model in the original layout, or a UNet by diffusers' names.


def _from_file(file: Path, dtype: torch.dtype, model: ModelConfig) -> UNet2DConditionModel:
    with loading("unet", str(file)):
        state = load_single_file_checkpoint(str(file))
    if is_lora(state):
        raise _lora_refused(file)
    original = {key: value for key, value in state.items() if key.startswith(ORIGINAL_PREFIX)}
    if not original and "conv_in.weight" not in state:
        raise refused(
            "unet",
            f"{file} holds no UNet (its first tensor is {next(iter(sorted(state)), 'missing')}). Name a "
            f"checkpoint in the original SDXL layout ({ORIGINAL_PREFIX}*), or the weights of a diffusers UNet "
            "(conv_in.weight, ...).",
        )
    has_config = not original and (file.parent / "config.json").is_file()
    settings = _read_settings(file.parent) if has_config else _architecture(model)
    if original:
        _check_has_embedding(original, f"{ORIGINAL_PREFIX}label_emb.0.0.weight", str(file))
        with loading("unet", str(file)):
            state = convert_ldm_unet_checkpoint(original, settings)
        if len(state) < len(original):  # the conversion leaves out what has no place
            raise refused(
                "unet",
                f"{file} has {len(original)} tensors in its UNet, of which SDXL's names take {len(state)}. "
                "Name an SDXL checkpoint.",
            )
    unet = _empty(settings)
    _fill(unet, state, str(file), dtype)
    return unet


def _empty(settings: Mapping[str, Any]) -> UNet2DConditionModel:
    with init_empty_weights(include_buffers=False):
        return UNet2DConditionModel.from_config(settings)


def _fill(unet: UNet2DConditionModel, state: _State, name: str, dtype: torch.dtype) -> None:
    """Give an empty UNet these weights: all of them, and no others."""
    _check_has_embedding(state, "add_embedding.linear_1.weight", name)
    shapes = {key: tuple(value.shape) for key, value in unet.state_dict().items()}
    faults = {
        "missing": sorted(shapes.keys() - state.keys()),
        "without a place": sorted(state.keys() - shapes.keys()),
        "of another shape": [
            f"{key}: {list(state[key].shape)}, not {list(shape)}"
            for key, shape in sorted(shapes.items())
            if key in state and tuple(state[key].shape) != shape
        ],
    }
    met = "; ".join(f"{len(keys)} {what}, e.g. {keys[0]}" for what, keys in faults.items() if keys)
    if met:
        raise refused(
            "unet",
            f"the weights of {name} do not fit the model's UNet ({len(shapes)} tensors): {met}. "
            "Name a complete UNet of the model in model.path, or that model's configs as model.config.",
        )
    # Copies: the tensors of a file are views of it, and it may be replaced while the UNet is in use.
    copies = {key: state[key].to(dtype, copy=True) if state[key].is_floating_point() else state[key] for key in shapes}
    unet.load_state_dict(copies, assign=True)


# What a UNet is, by its config or its names.


def _architecture(model: ModelConfig) -> Mapping[str, Any]:
    """The settings of the model's UNet: those that weights without a config must fit."""
    if model.config is None and model.path == TINY:
        return dict(tiny_denoiser().config)
    folder, _, _ = config_folder(model.path, model.config, ["unet/config.json"])
    if not (folder / "unet" / "config.json").is_file():
        raise refused(
            "unet",
            f"{folder} has no unet/config.json, which weights without a config of their own need. "
            "Set model.config to the diffusers folder or hub id of an SDXL model.",
        )
    return _read_settings(folder / "unet")


def _read_settings(folder: Path) -> Mapping[str, Any]:
    """The settings in a UNet's config.json. ModelError unless they are those of an SDXL base UNet."""
    settings = read_config("unet", folder, UNet2DConditionModel)
    class_name = settings.get("_class_name", UNet2DConditionModel.__name__)
    embedding, channels = settings.get("addition_embed_type"), settings.get("in_channels")
    width = settings.get("cross_attention_dim")
    # The refiner's one text encoder pools to the width of its hidden states, next to which it takes five time ids.
    time_dim = settings.get("addition_time_embed_dim") or 0
    is_refiner = time_dim and (settings.get("projection_class_embeddings_input_dim") or 0) - 5 * time_dim == width
    checks = {
        f"is a {class_name}": class_name != UNet2DConditionModel.__name__,
        f"has addition_embed_type {embedding!r} and cross_attention_dim {width}, as Stable Diffusion 1 and 2 have": (
            embedding != "text_time"
        ),
        f"takes {channels} channels, as an inpainting UNet does, not {LATENT_CHANNELS}": channels != LATENT_CHANNELS,
        f"takes 5 time ids and cross_attention_dim {width}, as SDXL's refiner does": is_refiner,
    }
    met = next((met for met, applies in checks.items() if applies), None)
    if met is not None:
        raise refused(
            "unet",
            f"{folder} {met}. An SDXL base UNet2DConditionModel is needed (addition_embed_type 'text_time', "
            f"{LATENT_CHANNELS} channels, 6 time ids, cross_attention_dim 2048). Name one.",
        )
    return settings


def _check_has_embedding(state: _State, name_of_weight: str, name: str) -> None:
    """ModelError if the weights lack SDXL's additional embedding, which no other family of that shape has."""
    if name_of_weight in state:
        return
    width = next((value.shape[-1] for key, value in state.items() if key.endswith("attn2.to_k.weight")), "unknown")
    raise refused(
        "unet",
        f"{name} has no {name_of_weight} (SDXL's embedding of sizes and pooled text), and its "
        f"cross_attention_dim is {width}: it is incomplete, or a UNet of Stable Diffusion 1 or 2. Name an SDXL UNet.",
    )


def _lora_refused(path: Path) -> ModelError:
    return refused(
        "unet",
        f"{path} is a LoRA, which changes a UNet but is none. Name it as the LoRA, and the UNet that it was "
        "trained on as the UNet.",
    )


# The scheduler.


def _scheduler_folder(name: str, model: ModelConfig) -> Path | None:
    """The folder with the scheduler's config that belongs to this name, or None."""
    if os.path.isdir(name) or not is_checkpoint("scheduler", name):
        folder = local_folder("scheduler", name, [_SCHEDULER_FILE])[1]
    elif name == model.path:
        folder = config_folder(model.path, model.config, [_SCHEDULER_FILE])[0]
    else:
        return None
    return folder / "scheduler" if (folder / _SCHEDULER_FILE).is_file() else None


def _scheduler_marks(name: str) -> dict[str, Any]:
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
