"""Tiny models of all families as pipelines: no download, random weights that a seed determines, made in a moment.

Their images are noise: they are for trials and tests. `tiny_photos_pipeline` has trained weights: it knows the
quickstart's photos.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from latentcache.families import DEFAULT, family_named
from latentcache.models.model_files import TINY_PHOTOS_FOLDER, loading


def tiny_parts(seed: int = 0, family: str = DEFAULT) -> dict[str, Any]:
    """The frozen parts of the family's tiny model by name: float32, CPU, eval. See `Family.tiny`."""
    return {name: tiny_part(name, seed, family) for name in family_named(family).parts}


def tiny_part(name: str, seed: int = 0, family: str = DEFAULT) -> Any:
    """One part of `Family.tiny`, the denoiser and the scheduler too: a copy of its own, which a caller may change."""
    return copy.deepcopy(_built(seed, family)[name])


@lru_cache(maxsize=4)
def _built(seed: int, family: str) -> dict[str, Any]:
    """Building all of a model takes longer than copying one part, and parts are requested one by one."""
    return family_named(family).tiny(seed)


def tiny_denoiser(seed: int = 0, family: str = DEFAULT) -> Any:
    """A denoiser that fits these parts: float32, CPU, trainable."""
    return tiny_part(family_named(family).denoiser, seed, family).train().requires_grad_(True)


def tiny_pipeline(parts: Mapping[str, Any] | None = None, *, seed: int = 0, family: str = DEFAULT) -> Any:
    """A whole pipeline of diffusers over `parts`; those that are not given are of the tiny model."""
    found = family_named(family)
    made = copy.deepcopy(_built(seed, family))
    made[found.denoiser].train().requires_grad_(True)
    return found.pipeline(**{**made, **(parts or {})})


def tiny_photos_pipeline() -> Any:
    """The tiny model that was trained on the quickstart's photos: float32, CPU, eval, frozen; v-prediction.

    It is what `model.path: tiny-photos` names. It returns these photos for their captions, in 256x256 pixels, and
    little else. `scripts/train_tiny.py` makes it.
    """
    family = family_named(DEFAULT)
    with loading("model", str(TINY_PHOTOS_FOLDER)):
        made = family.pipeline_class.from_pretrained(
            TINY_PHOTOS_FOLDER, local_files_only=True, **family.pipeline_options
        )
    parts = {name: part for name, part in made.components.items() if part is not None}
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            torch.nn.Module.float(part).eval().requires_grad_(False)
    return family.pipeline(**parts)
