"""Which family a model belongs to: as the config says, or as its folder does."""

from __future__ import annotations

import json
import os
from typing import Any

from latentcache.config import ModelConfig
from latentcache.errors import ModelError
from latentcache.families import DEFAULT, FAMILIES, family_named, family_of_pipeline
from latentcache.families.base import Family
from latentcache.models.model_files import TINY, TINY_PHOTOS, is_checkpoint, loading, local_folder


def family_of(config: ModelConfig) -> tuple[Family, str]:
    """The family of the config's model, and where that is stated, for people.

    It is `model.family`, else that of the pipeline which the model's model_index.json names. A file and a folder
    without a model_index.json say nothing: they are taken as of the family DEFAULT. Raises ModelError for a pipeline of
    a family that is not known, and for a hub id that cannot be read.
    """
    if config.family is not None:
        return family_named(config.family), "model.family says so"
    name = config.config or config.path
    if name in (TINY, TINY_PHOTOS):
        return family_named(DEFAULT), f"{name} is of this family where model.family names no other one"
    index = _index_of(name)
    if index is None:
        reason = "has no model_index.json" if os.path.isdir(name) else "is one file, which does not say it"
        return family_named(DEFAULT), f"{name} {reason}: set model.family if it is another one"
    with loading("model", name):
        class_name = str(index["_class_name"])
    family = family_of_pipeline(class_name)
    if family is None:
        raise ModelError(
            f"model: {name} is a model of {class_name}, whose family is not known. Set model.family to the one whose "
            f"parts it has: {', '.join(FAMILIES)}.",
            part="model",
        )
    return family, f"{name} is a model of {class_name}"


def pipeline_settings(config: ModelConfig, family: Family) -> dict[str, Any]:
    """What the model's model_index.json says of `family.pipeline_settings`: nothing where there is none.

    ModelError as from `family_of`.
    """
    index = _index_of(config.config or config.path) if family.pipeline_settings else None
    return {name: index[name] for name in family.pipeline_settings if name in index} if index else {}


def _index_of(name: str) -> dict[str, Any] | None:
    """The document of model_index.json; None for a tiny model, one file, and a folder without it."""
    if name in (TINY, TINY_PHOTOS) or (not os.path.isdir(name) and is_checkpoint("model", name)):
        return None
    file = local_folder("model", name, ["model_index.json"])[1] / "model_index.json"
    if not file.is_file():
        return None
    with loading("model", name):
        return dict(json.loads(file.read_text(encoding="utf-8")))
