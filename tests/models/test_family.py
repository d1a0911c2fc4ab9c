"""Which family a config's model is of, and what the run says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from latentcache.config import Config, ModelConfig
from latentcache.errors import ModelError
from latentcache.families import DEFAULT, FAMILIES, family_named, family_of_denoiser
from latentcache.models.denoiser import load_denoiser, load_scheduler
from latentcache.models.files import family_of
from latentcache.precache.run import run_precache

SAME_MODEL = {"qwen-image-21-edit": "qwen-image-21", "anima-states": "anima", "ideogram4-projected": "ideogram4"}
"""Families that have the model of another one, which a folder is taken as."""


def folder_of(path: Path, index: object, name: str = "model_index.json") -> ModelConfig:
    path.mkdir()
    (path / name).write_text(index if isinstance(index, str) else json.dumps(index), encoding="utf-8")
    return ModelConfig(path=str(path))


def test_a_folder_names_its_pipeline(tmp_path: Path) -> None:
    for family in map(family_named, FAMILIES):
        for number, pipeline in enumerate((family.pipeline_name, *family.pipeline_names)):
            model = folder_of(tmp_path / f"{family.name}-{number}", {"_class_name": pipeline})
            found, reason = family_of(model)
            assert found is family_named(SAME_MODEL.get(family.name, family.name))
            assert reason == f"{model.path} is a model of {pipeline}"
    # What the config states goes first, and nothing is read; a checkpoint's is what its config says.
    stated = family_of(ModelConfig(family=DEFAULT, path=model.path))
    assert stated == (family_named(DEFAULT), "model.family says so")
    (file := tmp_path / "model.safetensors").touch()
    assert family_of(ModelConfig(path=str(file), config=model.path))[0] is found
    for path in (file, tmp_path):
        default, reason = family_of(ModelConfig(path=str(path)))
        assert default.name == DEFAULT and reason.endswith(": set model.family if it is another one")


def test_a_folder_of_modular_blocks_and_one_of_a_community_script(tmp_path: Path) -> None:
    index = {"_class_name": "AnimaModularPipeline", "_blocks_class_name": "AnimaAutoBlocks"}
    family, reason = family_of(model := folder_of(tmp_path / "model", index, "modular_model_index.json"))
    assert family.name == "anima" and reason == f"{model.path} is a model of AnimaModularPipeline"
    # The script's file, then the pipeline in it.
    index = {"_class_name": ["lpw", "StableDiffusionXLLongPromptWeightingPipeline"]}
    assert family_of(folder_of(tmp_path / "community", index))[0].name == "sdxl"


def test_no_pipeline_is_of_two_families() -> None:
    families = [family_named(name) for name in FAMILIES if name not in SAME_MODEL]
    patterns = {each.name: (each.pipeline_name, *each.pipeline_names) for each in families}
    for pipeline in (name for name in dir(diffusers) if name.endswith("Pipeline")):
        found = [name for name in patterns if any(fnmatchcase(pipeline, known) for known in patterns[name])]
        assert len(found) <= 1, pipeline


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"_class_name": "StableDiffusion3Pipeline"}, r"whose family is unknown.*: sdxl, sd15"),
        ({"_class_name": "WanVACEPipeline"}, "is a model of WanVACEPipeline, whose family is unknown"),
        (
            {"_class_name": "QwenImageEditPipeline"},
            r"It is the first Qwen-Image-Edit, .*of QwenImageEditPlusPipeline, as Qwen/Qwen-Image-Edit-2511",
        ),
        *((index, "could not be loaded") for index in ("{", "[]", "{}")),
    ],
)
def test_a_folder_of_no_family_is_refused_and_none_is_guessed(index: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        family_of(folder_of(tmp_path / "model", index))


def test_tiny_is_refused_for_another_family(make_config: Callable[..., Config]) -> None:
    config = make_config(**{"model.family": "flux"})
    for load in (
        lambda: run_precache(config, dry_run=True),
        lambda: load_denoiser(dtype=torch.float32, model=config.model),
        lambda: load_scheduler(model=config.model),
    ):
        with pytest.raises(ModelError, match=r"tiny is a model of sdxl, but the family is flux\."):
            load()


@pytest.mark.parametrize(
    ("class_name", "config", "name"),
    [
        ("UNet2DConditionModel", {"addition_embed_type": "text_time", "in_channels": 9}, "sdxl"),
        ("UNet2DConditionModel", {"in_channels": 9}, "sd15"),
        ("WanTransformer3DModel", {"in_channels": 48}, "wan"),
        ("OptimizedModule", {}, DEFAULT),
    ],
)
def test_an_odd_denoiser_is_of_the_family_whose_config_it_has(class_name: str, config: Any, name: str) -> None:
    """load_lora, save_lora and denoise ask this where they are given no family. Others: test_family_denoisers.py."""
    assert family_of_denoiser(type(class_name, (), {"config": config})()).name == name
    with pytest.raises(ModelError, match=r"a Flux2Transformer2DModel .* families: flux2, flux2-dev\. Name"):
        family_of_denoiser(type("Flux2Transformer2DModel", (), {"config": {}})())
