"""Which family a model belongs to: as the config says, or as its folder does."""

from __future__ import annotations

import json
import os
from pathlib import Path

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
    if not os.path.isdir(name) and is_checkpoint("model", name):
        return _default(name, "is one file, which does not say it")
    folder = local_folder("model", name, ["model_index.json"])[1]
    if not (folder / "model_index.json").is_file():
        return _default(name, "has no model_index.json")
    class_name = _pipeline_in(folder / "model_index.json", name)
    family = family_of_pipeline(class_name)
    if family is None:
        raise ModelError(
            f"model: {name} is a model of {class_name}, whose family is not known. Set model.family to the one whose "
            f"parts it has: {', '.join(FAMILIES)}.",
            part="model",
        )
    return family, f"{name} is a model of {class_name}"


def _default(name: str, reason: str) -> tuple[Family, str]:
    return family_named(DEFAULT), f"{name} {reason}: set model.family if it is another one"


def _pipeline_in(index: Path, name: str) -> str:
    with loading("model", name):
        return str(json.loads(index.read_text(encoding="utf-8"))["_class_name"])
