"""Every family is validated and trained from its cache: the loss is that of live encoding, and each command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.family_runs import SIDE, TEXTS, FamilyRun, family_config, guidance_with_negative
from helpers.loss_cases import noise_of, timestep_of
from helpers.tiny_models import tiny_folder, tiny_model, without_torchvision

from latentcache import LatentCache, ValidationRunner, validate
from latentcache.config import Config, ValidationConfig
from latentcache.config_file import parse_config
from latentcache.families import FAMILIES, family_named
from latentcache.families.scaling import latents_from_moments
from latentcache.models.lora import LORA_FILE
from latentcache.precache.run import run_precache
from latentcache.validation.loss import validation_loss
from latentcache.validation.noise_schedule import NoiseSchedule

pytestmark = pytest.mark.families

NUM_TIMESTEPS = 2


def live_loss(run: FamilyRun, text: str) -> list[float]:
    """The loss of this photo at each of its timesteps, with the photo encoded now."""
    family, schedule = run.family, NoiseSchedule.of(run.parts["scheduler"])
    sample_id = run.rows[text].sample_id
    with torch.no_grad():
        moments = family.encode_image(run.parts["vae"], run.pixels(text)).contiguous()
        latents = run.scaling.apply(latents_from_moments(moments))
        losses = []
        for part in range(NUM_TIMESTEPS):
            index = timestep_of(sample_id, part * 1000 // NUM_TIMESTEPS, (part + 1) * 1000 // NUM_TIMESTEPS)
            noise, at = noise_of(sample_id, index, latents), torch.tensor([index])
            noisy = schedule.noised(latents, noise, at)
            predicted = family.predict(run.denoiser, noisy, schedule.timesteps[at], run.batch([text]))
            target = noise if schedule.prediction_type == "epsilon" else noise - latents
            losses.append((predicted - target).square().mean(dim=tuple(range(1, target.ndim))).item())
    return losses


def test_the_loss_is_that_of_live_encoding(run: FamilyRun) -> None:
    settings = ValidationConfig(num_timesteps=NUM_TIMESTEPS, batch_size=1)
    given: dict[str, Any] = {"scheduler": run.parts["scheduler"], "datasets": ["photos"]}
    report = validation_loss(run.denoiser, run.cache, settings=settings, **given)
    assert not report.skipped
    for text in TEXTS:
        expected = live_loss(run, text)
        assert report.by_sample["photos"][run.rows[text].sample_id] == sum(expected) / len(expected), text
    # Texts of unequal lengths in one call of the denoiser.
    together = validation_loss(
        run.denoiser, run.cache, settings=ValidationConfig(num_timesteps=2, batch_size=4), **given
    )
    for sample_id, loss in report.by_sample["photos"].items():
        assert together.by_sample["photos"][sample_id] == pytest.approx(loss, rel=1e-4)


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def config(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A training set and a validation set of the same photos, and one prompt, whose model is the family's tiny one."""
    reads_controls = family_named(name).text_reads_control
    has_clips = bool(family_named(name).clip_condition)
    given = family_config(tmp_path, with_controls=reads_controls, with_clips=has_clips).model_dump(mode="json")
    [dataset] = given["datasets"]
    given["datasets"] = [dataset, {**dataset, "name": "held-out", "role": "validation"}]
    given["model"]["path"] = tiny_folder(name)
    if family_named(name).whole or name == "qwen-image-21-edit":  # a folder of the model is taken as of another family
        given["model"]["family"] = name
    without_torchvision(monkeypatch, family_named(name))
    given["validation"] |= {
        "path": str(tmp_path / "validation"),
        "prompts": [] if reads_controls or has_clips else ["a cat"],
        "num_timesteps": 2,
        "num_inference_steps": 2,
        "guidance_scale": guidance_with_negative(family_named(name)),
        "height": SIDE,
        "width": SIDE,
    }
    return parse_config(given)


def test_a_cold_cache_is_filled_and_validated(name: str, config: Config) -> None:
    parts = tiny_model(name)
    run_precache(config.model_copy(update={"datasets": config.datasets[:1]}))
    with LatentCache(config.cache) as cache:
        report = ValidationRunner(parts, cache, config).run(3)
    assert report is not None and report.loss is not None and report.loss.loss.num == len(TEXTS)
    assert not report.loss.skipped and report.num_filled == 0, "the same photos are in the training set"
    assert len(report.images) == len(config.validation.prompts)
    for sample in report.images:
        assert sample.image.size == (SIDE, SIDE) and len(sample.image.getcolors(SIDE**2) or ()) > 10
    # Without any encoder, as the command does it: the same numbers.
    assert validate(config).report.loss == report.loss


def test_a_lora_is_trained_and_validated(name: str, config: Config, script: Any, tmp_path: Path) -> None:
    run_precache(config)
    options = script.Options(steps=2, rank=2, learning_rate=1e-2, batch_size=2, out=tmp_path / "lora", device="cpu")
    result = script.train(config, options)
    assert result["step"] == 2 and len(set(result["losses"])) == 2
    [trained] = result["validations"]
    found = validate(config, lora=str(tmp_path / "lora" / LORA_FILE)).report.loss
    assert found is not None and trained["loss"] == found.loss.mean
