"""Which family a model belongs to: as the config says, or as its folder does."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from latentcache.config import ModelConfig
from latentcache.errors import ModelError
from latentcache.families import DEFAULT, FAMILIES, family_named, family_of_pipeline
from latentcache.families.base import Family
from latentcache.models.model_files import TINY, TINY_PHOTOS, is_checkpoint, loading, local_folder

logger = logging.getLogger("latentcache")


def family_of(config: ModelConfig) -> Family:
    """The family of the config's model: `model.family`, else that of the pipeline which its model_index.json names.

    A file and a folder without a model_index.json say nothing: they are taken as of the family DEFAULT, which is
    logged. Raises ModelError for a pipeline of a family that is not known.
    """
    if config.family is not None:
        return family_named(config.family)
    name = config.config or config.path
    if name in (TINY, TINY_PHOTOS):
        return family_named(DEFAULT)
    if not os.path.isdir(name) and is_checkpoint("model", name):
        return _default(name, "is one file")
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
    if family.name != DEFAULT:
        logger.info("%s is a model of %s, so its family is %s", name, class_name, family.name)
    return family


def _default(name: str, reason: str) -> Family:
    logger.info("%s %s, so its family is taken as %s; model.family says another one", name, reason, DEFAULT)
    return family_named(DEFAULT)


def _pipeline_in(index: Path, name: str) -> str:
    with loading("model", name):
        return str(json.loads(index.read_text(encoding="utf-8"))["_class_name"])
