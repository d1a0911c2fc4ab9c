"""Tiny models of the family DEFAULT that need no download: one with random weights, one trained.

The first, for trials and tests, generates noise. The second generates the quickstart's photos.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from latentcache.families import DEFAULT, family_named
from latentcache.models.files import TINY_PHOTOS_FOLDER, loading

_TOPOLOGY = {
    "sample_size": 8,
    "block_out_channels": (32, 64, 64),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (2, 4, 8),
    "transformer_layers_per_block": (1, 1, 2),
}
"""Topology of the UNet with random weights."""


def tiny_parts(seed: int = 0) -> dict[str, Any]:
    """The frozen parts of the tiny model by name: float32, CPU, eval. The weights depend only on the seed."""
    return {name: tiny_part(name, seed) for name in family_named(DEFAULT).parts}


def tiny_part(name: str, seed: int = 0) -> Any:
    """A fresh copy of one part of the tiny model, which may also be the denoiser or the scheduler."""
    return copy.deepcopy(_built(seed)[name])


def tiny_denoiser(seed: int = 0) -> Any:
    """The tiny model's denoiser: float32, CPU, trainable."""
    return tiny_part(family_named(DEFAULT).denoiser, seed).train().requires_grad_(True)


def tiny_photos_pipeline() -> Any:
    """The tiny model trained on the quickstart's photos: float32, CPU, eval, frozen, v-prediction.

    This is `model.path: tiny-photos`. It reproduces these photos at 256x256 for their captions, and little else.
    """
    family = family_named(DEFAULT)
    with loading("model", str(TINY_PHOTOS_FOLDER)):
        made = family.pipeline_class.from_pretrained(
            TINY_PHOTOS_FOLDER, local_files_only=True, **family.pipeline_options
        )
    parts = {name: part for name, part in made.components.items() if part is not None}
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            torch.nn.Module.float(part)
    return family.pipeline(**frozen(parts))


@lru_cache(maxsize=4)
def _built(seed: int) -> dict[str, Any]:
    """All parts, frozen. Cached, because building them takes longer than copying one.

    Except for the weights and the UNet's topology they are the trained model's.
    """
    from diffusers import EulerDiscreteScheduler, UNet2DConditionModel

    family, folder = family_named(DEFAULT), TINY_PHOTOS_FOLDER
    classes = {name: part.load_class() for name, part in family.parts.items()}
    made = {name: classes[name].from_pretrained(folder / name) for name in family.names("tokenizer")}
    with seeded(seed):
        for name in family.names("text_encoder"):
            made[name] = classes[name](classes[name].config_class.from_pretrained(folder / name, dtype="float32"))
        made["vae"] = classes["vae"].from_config(classes["vae"].load_config(folder / "vae"))
    with seeded(seed):
        unet_settings: Any = UNet2DConditionModel.load_config(folder / "unet")
        made["unet"] = UNet2DConditionModel.from_config({**unet_settings, **_TOPOLOGY})
    # As in published models.
    settings = {"prediction_type": "epsilon", "timestep_spacing": "leading", "steps_offset": 1}
    made["scheduler"] = EulerDiscreteScheduler.from_pretrained(folder / "scheduler", **settings)
    return frozen(made)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU's global generator inside the block, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def frozen(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Freeze all modules of the parts and put them in eval mode. Returns the parts."""
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            part.eval().requires_grad_(False)
    return dict(parts)
