"""A distilled model's pipeline has other guidance or another schedule, which its model_index.json says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from helpers.family_runs import family_config
from helpers.tiny_models import tiny_model

from latentcache import LatentCache, ValidationRunner
from latentcache.config import Config, ModelConfig, ValidationConfig
from latentcache.config_file import parse_config
from latentcache.errors import ModelError
from latentcache.families import FAMILIES, family_named
from latentcache.models.family import pipeline_settings
from latentcache.precache.run import run_precache
from latentcache.validation import runner
from latentcache.validation.sample_images import PromptEmbeddings, denoise

SETTINGS = ValidationConfig(height=64, width=64, num_inference_steps=2, guidance_scale=4.0)
DISTILLED = {"is_distilled": True}
NAMES = [name for name in FAMILIES if family_named(name).pipeline_settings]


@pytest.mark.parametrize("name", NAMES)
def test_images_are_those_of_the_distilled_pipeline(name: str) -> None:
    family = family_named(name)
    parts = tiny_model(family.name)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    recipe = {**family.text_recipe(), "max_length": 48}
    with torch.no_grad():
        made = family.encode_text(parts, family.tokenize(parts, ["a cat", ""]), recipe)
    positive, negative = ({key: value[part] for key, value in made.items()} for part in (slice(0, 1), slice(1, 2)))
    given = PromptEmbeddings("a cat", "", positive, negative)
    plain, found = (
        denoise(parts["transformer"], scheduler, [given], SETTINGS, family=family, pipeline_settings=settings)[0]
        for settings in ({}, DISTILLED)
    )
    live = family.pipeline_class(**{**dict.fromkeys(parts), **parts, "scheduler": scheduler}, **DISTILLED)
    live.set_progress_bar_config(disable=True)
    options = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent", "return_dict": False}
    seed = torch.Generator().manual_seed(SETTINGS.seed)
    kwargs = family.pipeline_kwargs(positive, negative)
    expected = live(**kwargs, **options, **family.guidance_kwargs(4.0), generator=seed)[0]
    if name == "flux2":  # whose pipeline undoes the scaling
        without_vae = {"transformer": parts["transformer"], "scheduler": scheduler, **DISTILLED}
        seed.manual_seed(SETTINGS.seed)
        expected = family.pipeline(**without_vae)(**kwargs, **options, guidance_scale=1.0, generator=seed)[0]
    assert torch.equal(found, family.final_latents(expected, 64, 64))
    assert not torch.equal(found, plain)


def folder_of(path: Path, index: str) -> ModelConfig:
    path.mkdir()
    (path / "model_index.json").write_text(index, encoding="utf-8")
    return ModelConfig(path=str(path), family="krea2")


def test_the_models_folder_says_it(tmp_path: Path) -> None:
    klein, sdxl = family_named("flux2"), family_named("sdxl")
    distilled = folder_of(tmp_path / "one", '{"_class_name": "Flux2KleinPipeline", "is_distilled": true}')
    assert pipeline_settings(distilled, klein) == DISTILLED
    assert pipeline_settings(distilled, sdxl) == {} == pipeline_settings(distilled, family_named("flux2-dev"))
    assert pipeline_settings(folder_of(tmp_path / "two", '{"_class_name": "Krea2Pipeline"}'), klein) == {}
    assert pipeline_settings(ModelConfig(path="tiny"), klein) == {}
    with pytest.raises(ModelError, match="could not be loaded"):
        pipeline_settings(folder_of(tmp_path / "three", "3"), klein)


@pytest.mark.families
def test_a_validation_asks_the_models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, seen = family_named("krea2"), []
    parts = tiny_model(family.name)
    family.pipeline(**parts, **DISTILLED).save_pretrained(tmp_path / "model")
    folder = tmp_path / "model"

    def noted(*arguments: Any, **options: Any) -> list[torch.Tensor]:
        seen.append(options["pipeline_settings"])
        return denoise(*arguments, **options)

    monkeypatch.setattr(runner, "denoise", noted)
    validation = {"prompts": ["a cat"], "path": str(tmp_path / "results"), "num_inference_steps": 1}

    def config_of(path: Path) -> Config:
        given = family_config(tmp_path).model_dump(mode="json")
        given["validation"] |= {**validation, "height": 64, "width": 64}
        return parse_config({**given, "model": {"path": str(path)}})

    config = config_of(folder)
    run_precache(config)
    with LatentCache(config.cache) as cache:
        assert ValidationRunner(parts, cache, config).run(1).notes == ()
        [note] = ValidationRunner(parts, cache, config_of(tmp_path / "gone.safetensors")).run(2).notes
    assert seen == [DISTILLED, {}]
    assert note.startswith("images are made with the defaults of Krea2Pipeline: ") and "gone.safetensors" in note
