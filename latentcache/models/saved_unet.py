"""The UNet in a checkpoint folder that `devices.checkpoint` wrote during a training run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from latentcache.checkpoints.folder import read_document, read_tensors
from latentcache.checkpoints.state_codec import unpack
from latentcache.errors import CheckpointError, ModelError
from latentcache.models.lora import SETTINGS_KEY

logger = logging.getLogger("latentcache")

_PEFT_PREFIX = "base_model.model."
"""What peft's own wrapper (`get_peft_model`) puts before a module's names."""
_BUILT_IN = (".lora_", ".base_layer.", ".modules_to_save.", ".original_module.")


@dataclass(frozen=True, slots=True)
class SavedUNet:
    """A UNet's state and the settings of the LoRA adapters in it (see `lora.lora_settings`), or None."""

    state: Mapping[str, torch.Tensor]
    adapters: Mapping[str, Any] | None


def read_saved_unet(folder: Path) -> SavedUNet:
    """The UNet of the checkpoint's model part: the whole part, or the module `unet` of several.

    Raises ModelError if the checkpoint is damaged, has no UNet, or has LoRA weights without their settings.
    """
    try:
        document = read_document(folder)
        parts = {
            part: unpack(document["parts"][part], read_tensors(folder, document, part)) for part in ("model", "extra")
        }
    except CheckpointError as error:
        raise ModelError(f"unet: {error}", part="unet") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"unet: {folder} is not what latentcache writes: {error!r}. Save it anew.", part="unet"
        ) from error
    state = _unet_state(folder, parts["model"])
    if not any(mark in key for key in state for mark in _BUILT_IN):
        return SavedUNet(state, None)
    extra = parts["extra"]
    adapters = extra.get(SETTINGS_KEY) if isinstance(extra, Mapping) else None
    if not isinstance(adapters, Mapping):
        raise ModelError(
            f"unet: {folder} holds a UNet with LoRA weights, but not their settings (alpha, rank, targets), without "
            f"which the weights mean nothing. Save it with extra={{{SETTINGS_KEY!r}: lora_settings(unet)}}, or write "
            "the LoRA with StableDiffusionXLPipeline.save_lora_weights and name that file as the LoRA.",
            part="unet",
        )
    return SavedUNet(state, adapters)


def _unet_state(folder: Path, model: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = {key.removeprefix("unet."): value for key, value in model.items() if key.startswith("unet.")}
    if state:
        others = sorted({key.split(".", 1)[0] for key in model if not key.startswith("unet.")})
        if others:
            logger.warning("%s: only its unet is loaded, not its %s", folder, ", ".join(others))
    else:
        state = dict(model)
    state = {key.removeprefix(_PEFT_PREFIX): value for key, value in state.items()}
    if not any(key.startswith("conv_in.") for key in state):
        names = ", ".join(sorted({key.split(".", 1)[0] for key in model})[:8]) or "nothing"
        raise ModelError(
            f"unet: the model part of {folder} holds {names}, but no UNet. Save one as model=unet, or as "
            "model={'unet': unet, ...}.",
            part="unet",
        )
    return state
