"""The UNet of an SDXL model and its scheduler: what validation from the command line needs beside the cache.

`ModelLoader` never loads a UNet: filling a cache needs none.
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

from latentcache.checkpoints.folder import DOCUMENT
from latentcache.config import ModelConfig
from latentcache.errors import ModelError
from latentcache.families.sdxl import LATENT_CHANNELS
from latentcache.models.lora import add_adapters, is_lora
from latentcache.models.origin import (
    TINY,
    check_weights,
    checkpoint_configs,
    download,
    has_weights,
    is_checkpoint,
    load_pretrained,
    loading,
)
from latentcache.models.saved_unet import SavedUNet, read_saved_unet
from latentcache.models.tiny import tiny_pipeline, tiny_unet

STEM = "diffusion_pytorch_model"
"""How diffusers names the weights of a UNet."""
ORIGINAL_PREFIX = "model.diffusion_model."
"""The first part of a UNet's names in a checkpoint of the original layout (Stability's, kohya's, ComfyUI's)."""

logger = logging.getLogger("latentcache")

_SCHEDULER_FILE = "scheduler/scheduler_config.json"
_HUB_STEP = "Download it once while online, or name a local folder"
_Settings: TypeAlias = "Mapping[str, Any]"


def load_unet(
    path: str | Path | None = None, *, dtype: torch.dtype, model: ModelConfig | None = None
) -> UNet2DConditionModel:
    """The UNet at `path`, in `dtype`, on the CPU, frozen and in eval mode.

    `path` is `tiny`; a diffusers folder (its `unet/`); a UNet's own folder; a .safetensors file, in the original SDXL
    layout or with diffusers' names; a checkpoint folder of `devices.checkpoint` (its model part, with the LoRA adapters
    whose settings its `extra` holds, see `lora.lora_settings`); or a hub id. Default: `model.path`.

    Weights alone take their architecture from a config.json beside them, else from `model`: `model.config`, or the
    UNet of `model.path`. `model.variant` counts for `model.path`, and for a local folder that has it. ModelError for
    pickles, for weights that are missing, left over or of another shape, and for a UNet that is not SDXL's.
    """
    model = ModelConfig() if model is None else model
    name = model.path if path is None else str(path)
    if name == TINY:
        unet = torch.nn.Module.to(tiny_unet(), dtype)
    elif os.path.isdir(name):
        unet = _from_folder(name, Path(name), dtype, model)
    elif is_checkpoint("unet", name):
        unet = _from_file(name, dtype, model)
    else:
        unet = _from_hub(name, dtype, model)
    return unet.eval().requires_grad_(False)


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
            scheduler = _read_scheduler(name, folder)
        if scheduler is not None:
            return type(scheduler).from_config(scheduler.config, **marks) if marks else scheduler
    raise ModelError(
        f"scheduler: neither {name if path is None else path} nor model.path ({model.path}) has a {_SCHEDULER_FILE}. "
        "Name a whole diffusers folder as model.path, or as model.config of a checkpoint.",
        part="scheduler",
    )


def check_conditioning(unet: UNet2DConditionModel, prompt_embeds_dim: int, pooled_dim: int) -> None:
    """ModelError unless the UNet takes prompt_embeds [B, 77, D] and pooled_prompt_embeds [B, P] of these D and P."""
    config = unet.config
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    if (config.cross_attention_dim, pooled) != (prompt_embeds_dim, pooled_dim):
        raise ModelError(
            f"unet: takes prompt_embeds of width {config.cross_attention_dim} and pooled ones of width {pooled}, but "
            f"the cache has {prompt_embeds_dim} and {pooled_dim}. Name a UNet of the model that made the cache.",
            part="unet",
        )


def _from_folder(name: str, folder: Path, dtype: torch.dtype, model: ModelConfig) -> UNet2DConditionModel:
    if (folder / DOCUMENT).is_file():
        return _from_saved(name, read_saved_unet(folder), dtype, model)
    if (folder / "pytorch_lora_weights.safetensors").is_file():
        raise _is_a_lora(name)
    own = folder / "unet" if (folder / "unet").is_dir() else folder
    if not (own / "config.json").is_file():
        raise ModelError(
            f"unet: {own} has no config.json. Name a diffusers folder with unet/, a UNet's own folder with config.json "
            f"and {STEM}.safetensors, or a checkpoint folder with {DOCUMENT}.",
            part="unet",
        )
    strict = name == model.path
    variant = model.variant if strict or (model.variant and has_weights(own, STEM, model.variant)) else None
    return _from_own_folder(own, dtype, variant)


def _from_own_folder(folder: Path, dtype: torch.dtype, variant: str | None) -> UNet2DConditionModel:
    _check_settings(_read_settings(folder), str(folder))
    check_weights("unet", folder, STEM, variant)
    unet, unexpected = load_pretrained("unet", folder, UNet2DConditionModel, variant, torch_dtype=dtype)
    if unexpected:
        raise ModelError(
            f"unet: {folder} has {len(unexpected)} weights that its config.json has no place for, e.g. "
            f"{unexpected[0]}. Use a folder written by save_pretrained.",
            part="unet",
        )
    return unet


def _from_hub(name: str, dtype: torch.dtype, model: ModelConfig) -> UNet2DConditionModel:
    variant = model.variant if name == model.path else None
    infix = f".{variant}" if variant else ""
    files = ("config.json", f"{STEM}{infix}*.safetensors", f"{STEM}*.safetensors.index*")
    patterns = [f"{folder}{file}" for folder in ("", "unet/") for file in files]
    folder = download("unet", name, None, patterns, _HUB_STEP, variant)
    own = folder / "unet" if (folder / "unet").is_dir() else folder
    return _from_own_folder(own, dtype, variant)


def _from_file(name: str, dtype: torch.dtype, model: ModelConfig) -> UNet2DConditionModel:
    with loading("unet", name):
        state = load_single_file_checkpoint(name)
    if is_lora(state):
        raise _is_a_lora(name)
    original = {key: value for key, value in state.items() if key.startswith(ORIGINAL_PREFIX)}
    if not original and "conv_in.weight" not in state:
        raise ModelError(
            f"unet: {name} holds no UNet (its first tensor is {next(iter(sorted(state)), 'missing')}). Name a "
            f"checkpoint in the original SDXL layout ({ORIGINAL_PREFIX}*), or the weights of a diffusers UNet "
            "(conv_in.weight, ...).",
            part="unet",
        )
    beside = Path(name).parent
    if not original and (beside / "config.json").is_file():
        settings = _read_settings(beside)
        _check_settings(settings, str(beside))
    else:
        settings = _architecture(model)
    if original:
        _check_names(original, f"{ORIGINAL_PREFIX}label_emb.0.0.weight", name)
        with loading("unet", name):
            state = convert_ldm_unet_checkpoint(original, settings)
        if len(state) < len(original):
            # What has no place is left out by the conversion.
            raise ModelError(
                f"unet: {name} has {len(original)} tensors in its UNet, of which SDXL's names take {len(state)}. "
                "Name an SDXL checkpoint.",
                part="unet",
            )
    unet = _empty(settings)
    _fill(unet, state, name, dtype)
    return unet


def _from_saved(name: str, saved: SavedUNet, dtype: torch.dtype, model: ModelConfig) -> UNet2DConditionModel:
    unet = _empty(_architecture(model))
    with init_empty_weights(include_buffers=False):
        add_adapters(unet, saved.adapters)
    _fill(unet, saved.state, name, dtype)
    return unet


def _empty(settings: _Settings) -> UNet2DConditionModel:
    with init_empty_weights(include_buffers=False):
        return UNet2DConditionModel.from_config(settings)


def _fill(unet: UNet2DConditionModel, state: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype) -> None:
    """Give an empty UNet these weights: all of them, and no others."""
    _check_names(state, "add_embedding.linear_1.weight", name)
    wanted = {key: tuple(value.shape) for key, value in unet.state_dict().items()}
    missing = sorted(wanted.keys() - state.keys())
    left_over = sorted(state.keys() - wanted.keys())
    other = [key for key in sorted(wanted.keys() & state.keys()) if tuple(state[key].shape) != wanted[key]]
    faults = [
        f"{len(keys)} {what}, e.g. {keys[0]}"
        for what, keys in (("missing", missing), ("without a place", left_over))
        if keys
    ]
    if other:
        met, allowed = list(state[other[0]].shape), list(wanted[other[0]])
        faults.append(f"{len(other)} of another shape, e.g. {other[0]}: {met}, not {allowed}")
    if faults:
        raise ModelError(
            f"unet: the weights of {name} do not fit the model's UNet ({len(wanted)} tensors): {'; '.join(faults)}. "
            "Name a complete UNet of the model in model.path, or that model's configs as model.config.",
            part="unet",
        )
    # Copies: the tensors of a file are views of it, and it may be replaced while the UNet is in use.
    copies = {key: state[key].to(dtype, copy=True) if state[key].is_floating_point() else state[key] for key in wanted}
    unet.load_state_dict(copies, assign=True)


def _architecture(model: ModelConfig) -> _Settings:
    """The settings of the model's UNet: those that weights without a config must fit."""
    if model.config is None and model.path == TINY:
        return dict(tiny_unet().config)
    folder = _configs(model, ["unet/config.json"])
    if not (folder / "unet" / "config.json").is_file():
        raise ModelError(
            f"unet: {folder} has no unet/config.json, which weights without a config of their own need. "
            "Set model.config to the diffusers folder or hub id of an SDXL model.",
            part="unet",
        )
    settings = _read_settings(folder / "unet")
    _check_settings(settings, str(folder / "unet"))
    return settings


def _configs(model: ModelConfig, patterns: list[str]) -> Path:
    """The folder of the model's configs: model.config, else model.path, or what diffusers infers from that file."""
    name = model.path if model.config is None else model.config
    if os.path.isdir(name):
        return Path(name)
    if model.config is None and is_checkpoint("model", name):
        name, step = checkpoint_configs(name)
        return Path(name) if os.path.isdir(name) else download("model", name, None, patterns, step)
    return download("model", name, None, patterns, _HUB_STEP)


def _read_settings(folder: Path) -> _Settings:
    return _load_config("unet", str(folder), folder, UNet2DConditionModel)


def _load_config(part: str, name: str, folder: Path, config_class: Any) -> _Settings:
    with loading(part, name):
        settings = config_class.load_config(folder)
        if not isinstance(settings, Mapping):
            raise ValueError(f"its config holds {type(settings).__name__}, not settings by name")
        return settings


def _check_settings(settings: _Settings, name: str) -> None:
    """ModelError unless the settings are those of an SDXL base UNet."""
    met = None
    if settings.get("_class_name", "UNet2DConditionModel") != "UNet2DConditionModel":
        met = f"is a {settings['_class_name']}"
    elif settings.get("addition_embed_type") != "text_time":
        met = (
            f"has addition_embed_type {settings.get('addition_embed_type')!r} and cross_attention_dim "
            f"{settings.get('cross_attention_dim')}, as Stable Diffusion 1 and 2 have"
        )
    elif settings.get("in_channels") != LATENT_CHANNELS:
        met = f"takes {settings.get('in_channels')} channels, as an inpainting UNet does, not 4"
    elif _num_time_ids(settings) == 5:
        met = f"takes 5 time ids and cross_attention_dim {settings.get('cross_attention_dim')}, as SDXL's refiner does"
    if met is not None:
        raise ModelError(
            f"unet: {name} {met}. An SDXL base UNet2DConditionModel is needed (addition_embed_type 'text_time', "
            "4 channels, 6 time ids, cross_attention_dim 2048). Name one.",
            part="unet",
        )


def _num_time_ids(settings: _Settings) -> int:
    """5 for the refiner: its one text encoder is as wide in its pooled output as in its hidden states."""
    width, time_dim = settings.get("projection_class_embeddings_input_dim"), settings.get("addition_time_embed_dim")
    return 5 if width and time_dim and width - 5 * time_dim == settings.get("cross_attention_dim") else 6


def _check_names(state: Mapping[str, torch.Tensor], wanted: str, name: str) -> None:
    """ModelError if the weights lack SDXL's additional embedding, which no other family of that shape has."""
    if wanted in state:
        return
    width = next((value.shape[-1] for key, value in state.items() if key.endswith("attn2.to_k.weight")), "unknown")
    raise ModelError(
        f"unet: {name} has no {wanted} (SDXL's embedding of sizes and pooled text), and its cross_attention_dim is "
        f"{width}: it is incomplete, or a UNet of Stable Diffusion 1 or 2. Name an SDXL UNet.",
        part="unet",
    )


def _is_a_lora(name: str) -> ModelError:
    return ModelError(
        f"unet: {name} is a LoRA, which changes a UNet but is none. Name it as the LoRA, and the UNet that it was "
        "trained on as the UNet.",
        part="unet",
    )


def _scheduler_folder(name: str, model: ModelConfig) -> Path | None:
    """The folder with the scheduler's config that belongs to this name, or None."""
    if os.path.isdir(name):
        folder = Path(name)
    elif not is_checkpoint("scheduler", name):
        folder = download("scheduler", name, None, [_SCHEDULER_FILE], _HUB_STEP)
    elif name == model.path:
        folder = _configs(model, [_SCHEDULER_FILE])
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


def _read_scheduler(name: str, folder: Path) -> Any:
    # One class reads the settings of all: they share the file's name.
    settings = _load_config("scheduler", name, folder, diffusers.EulerDiscreteScheduler)
    class_name = settings.get("_class_name")
    scheduler_class = getattr(diffusers, str(class_name), None)
    if not (isinstance(scheduler_class, type) and issubclass(scheduler_class, diffusers.SchedulerMixin)):
        raise ModelError(
            f"scheduler: {folder} names the class {class_name!r}, which is no scheduler of diffusers "
            f"{diffusers.__version__}. Correct _class_name in its scheduler_config.json.",
            part="scheduler",
        )
    with loading("scheduler", name):
        return scheduler_class.from_config(settings)
