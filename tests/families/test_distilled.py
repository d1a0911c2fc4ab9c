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
from latentcache.config import Config, ValidationConfig
from latentcache.families import FAMILIES, family_named
from latentcache.precache.run import run_precache
from latentcache.validation import runner
from latentcache.validation.sample_images import PromptEmbeddings, denoise

SETTINGS = ValidationConfig(height=64, width=64, num_inference_steps=2, guidance_scale=4.0)
DISTILLED = {"is_distilled": True}
NAMES = [name for name in FAMILIES if family_named(name).pipeline_settings]


@pytest.mark.parametrize("name", NAMES)
def test_images_are_those_of_the_distilled_pipeline(name: str) -> None:
    family, parts = family_named(name), tiny_model(name)
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
    live = family.pipeline(transformer=parts["transformer"], scheduler=scheduler, **DISTILLED)
    options = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent", "return_dict": False}
    guidance = {"guidance_scale": 1.0} if name == "flux2" else family.guidance_kwargs(4.0)  # ignored, with a warning
    seed = torch.Generator().manual_seed(SETTINGS.seed)
    expected = live(**family.pipeline_kwargs(positive, negative), **options, **guidance, generator=seed)[0]
    assert torch.equal(found, family.final_latents(expected, 64, 64))
    assert not torch.equal(found, plain)


@pytest.mark.families
def test_a_validation_asks_the_models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, seen = family_named("krea2"), []
    parts = tiny_model(family.name)
    family.pipeline(**parts, **DISTILLED).save_pretrained(tmp_path / "model")

    def noted(*arguments: Any, **options: Any) -> list[torch.Tensor]:
        seen.append(options["pipeline_settings"])
        return denoise(*arguments, **options)

    monkeypatch.setattr(runner, "denoise", noted)
    validation = {"prompts": ["a cat"], "path": str(tmp_path / "results"), "num_inference_steps": 1}

    def config_of(path: Path) -> Config:
        size = {"height": 64, "width": 64}
        return family_config(tmp_path, {"model.path": str(path), "validation": {**validation, **size}})

    config = config_of(tmp_path / "model")
    run_precache(config)
    with LatentCache(config.cache) as cache:
        assert ValidationRunner(parts, cache, config).run(1).notes == ()
        [note] = ValidationRunner(parts, cache, config_of(tmp_path / "gone.safetensors")).run(2).notes
    assert seen == [DISTILLED, {}]
    assert note.startswith("images are made with the defaults of Krea2Pipeline: ") and "gone.safetensors" in note
