"""Which family a model belongs to: as the config says, or as its folder does."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from typing import Any

from latentcache.config import ModelConfig
from latentcache.errors import ModelError
from latentcache.families import DEFAULT, FAMILIES, family_named
from latentcache.families.base import Family
from latentcache.models.files import (
    MODEL_INDEXES,
    TINY,
    TINY_PHOTOS,
    is_checkpoint,
    local_folder,
    model_index,
    readable,
)


def family_of(config: ModelConfig) -> tuple[Family, str]:
    """The family of the config's model, and where that is stated, for people.

    It is `model.family`, else that of the pipeline which the model's model_index.json names, or its
    modular_model_index.json. A file and a folder without either say nothing: they are taken as of the family DEFAULT.
    Raises ModelError for a pipeline of a family that is not known or that the family refuses, and for a hub id that
    cannot be read.
    """
    if config.family is not None:
        return family_named(config.family), "model.family says so"
    name = config.config or config.path
    if name in (TINY, TINY_PHOTOS):
        return family_named(DEFAULT), f"{name} is of this family"
    index = _index_of(config)
    if index is None:
        reason = "has no model_index.json" if os.path.isdir(name) else "is one file, which does not say it"
        return family_named(DEFAULT), f"{name} {reason}: set model.family if it is another one"
    with readable("model", name):
        named = index["_class_name"]
        class_name = str(named[-1] if isinstance(named, list) else named)  # a list: the pipeline's own file, its class
    for family in map(family_named, FAMILIES):
        if any(fnmatchcase(class_name, known) for known in (family.pipeline_name, *family.pipeline_names)):
            return family, f"{name} is a model of {class_name}"
        if met := family.refused_pipelines.get(class_name):
            step = f"Name a model of {family.pipeline_name}, as {family.repositories[0]}"
            raise ModelError(f"model: {name} is a model of {class_name}. It {met}. {step}.", part="model")
    raise ModelError(
        f"model: {name} is a model of {class_name}, whose family is not known. Set model.family to the one whose parts "
        f"it has: {', '.join(FAMILIES)}.",
        part="model",
    )


def pipeline_settings(config: ModelConfig, family: Family) -> dict[str, Any]:
    """What the model's model_index.json says of `family.pipeline_settings`: nothing where there is none.

    ModelError as from `family_of`.
    """
    index = _index_of(config) if family.pipeline_settings else None
    return {name: index[name] for name in family.pipeline_settings if name in index} if index else {}


def denoised_share(config: ModelConfig, family: Family) -> tuple[float, float]:
    """Which of the timesteps the model's denoiser is for, as fractions of their number: from 0.0 to 1.0, or a part.

    A part where `boundary_ratio` in model_index.json divides them: `model.denoiser` has those below it if it is the
    family's second denoiser. ModelError as from `family_of`.
    """
    index = _index_of(config) if family.second_denoiser else None
    boundary = (index or {}).get("boundary_ratio")
    if boundary is None:
        return 0.0, 1.0
    return (0.0, boundary) if config.denoiser == family.second_denoiser else (boundary, 1.0)


def _index_of(config: ModelConfig) -> dict[str, Any] | None:
    """The document that names the pipeline; None for a tiny model, one file, and a folder without it."""
    name, revision = config.config or config.path, None if config.config else config.revision
    if name in (TINY, TINY_PHOTOS) or (not os.path.isdir(name) and is_checkpoint("model", name)):
        return None
    return model_index(local_folder("model", name, MODEL_INDEXES, revision=revision)[1], name)
