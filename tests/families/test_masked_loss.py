"""Masks in the loss, as validation and the training script compute it: against sums by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from helpers.family_runs import SIDE, family_config, loaded_models
from helpers.loss_cases import noise_of, timestep_of
from helpers.tiny_models import tiny_folder, tiny_model
from PIL import Image

from latentcache import LatentCache
from latentcache.config import Config, ValidationConfig
from latentcache.config_file import parse_config
from latentcache.families import family_named
from latentcache.families.base import Family
from latentcache.precache.run import run_precache
from latentcache.validation.loss import validation_loss
from latentcache.validation.noise_schedule import NoiseSchedule

pytestmark = pytest.mark.families

MIXED, WHITE, BLACK = "0.png", "1.png", "2.png"
"""The photos, by what their masks are."""


def mask_pixels(name: str) -> np.ndarray:
    """Of the mixed one the left half does not count, and the right half counts by its greys."""
    pixels = np.full((SIDE, SIDE), {MIXED: 0, WHITE: 255, BLACK: 0}[name], np.uint8)
    if name == MIXED:
        pixels[:, SIDE // 2 :] = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE // 2))
    return pixels


def weights_of(sample_ids: list[str], downscale: int) -> torch.Tensor:
    """What each latent of these samples has to count: [B, 1, h, w]."""
    rows = SIDE // downscale
    pixels = np.stack([mask_pixels(name) for name in sample_ids]).reshape(-1, 1, rows, downscale, rows, downscale)
    return torch.from_numpy(np.floor(pixels.mean(axis=(3, 5)) + 0.5) / 255)


def losses_by_hand(predicted: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> list[float]:
    """Of each sample, in double precision, on latents as the VAE has them."""
    errors = (predicted.detach() - target).double().square()
    if errors.shape[-1] != weights.shape[-1]:
        errors = diffusers.Flux2Pipeline._unpatchify_latents(errors)
    errors = errors.reshape(len(weights), -1, *weights.shape[-2:])
    return (errors * weights).mean(dim=(1, 2, 3)).tolist()


LAYOUTS = ("sdxl", "z-image", "flux2", "wan", "qwen-image-edit", "qwen-image-21")
"""One family for each layout of latents: what a mask does to a loss depends on nothing else of it."""


@pytest.fixture(params=LAYOUTS, scope="module")
def cached(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Family, Any, Config]:
    """The family, its tiny parts, and a config of the photos with masks and without."""
    folder, family = tmp_path_factory.mktemp("masked"), family_named(request.param)
    given = family_config(folder, with_controls=family.text_reads_control).model_dump(mode="json")
    (folder / "masks").mkdir()
    for name in (MIXED, WHITE, BLACK):
        Image.fromarray(mask_pixels(name)).save(folder / "masks" / name)
    [photos] = given["datasets"]
    given["datasets"] = [{**photos, "name": "masked", "mask": {"path": str(folder / "masks")}}, photos]
    given["model"]["path"] = tiny_folder(family.name)
    parts, config = tiny_model(family.name), parse_config(given)
    report = run_precache(config, models=loaded_models(family, parts))
    assert report.num_refused == 0 and report.misses_by_reason["mask: new"] == 3
    return family, parts, config


def test_the_validation_loss_counts_as_its_masks_say(cached: tuple[Family, Any, Config]) -> None:
    family, parts, config = cached
    schedule, denoiser = NoiseSchedule.of(parts["scheduler"]), parts[family.denoiser]
    settings = ValidationConfig(num_timesteps=1, batch_size=1)
    with LatentCache(config.cache) as cache:
        given: dict[str, Any] = {"scheduler": parts["scheduler"], "datasets": ["photos", "masked"]}
        found = validation_loss(denoiser, cache, settings=settings, **given).by_sample
        together = validation_loss(denoiser, cache, settings=ValidationConfig(num_timesteps=1), **given).by_sample
        batch = cache.restricted("masked").batch([MIXED], device="cpu", scaled=True)
    assert found["masked"][WHITE] == found["photos"][WHITE] > 0, "to the last bit"
    assert found["masked"][BLACK] == 0 < found["photos"][BLACK]
    index, latents = timestep_of(MIXED, 0, 1000), batch["latents"]
    noise, at = noise_of(MIXED, index, latents), torch.tensor([index])
    with torch.no_grad():
        noisy = schedule.noised(latents, noise, at)
        predicted = family.predict(denoiser, noisy, schedule.timesteps[at], batch)
    target, weights = schedule.target(latents, noise, at), weights_of([MIXED], family.latent.downscale)
    [expected] = losses_by_hand(predicted, target, weights)
    assert found["masked"][MIXED] == pytest.approx(expected, rel=1e-6)
    assert found["masked"][MIXED] < 0.6 * found["photos"][MIXED]
    assert together["masked"] == pytest.approx(found["masked"], rel=1e-4), "three masks in one batch"


def test_the_training_loss_counts_as_its_masks_say(
    cached: tuple[Family, Any, Config], script: Any, tmp_path: Path
) -> None:
    family, _, config = cached
    config = config.model_copy(update={"datasets": config.datasets[:1]})
    options = script.Options(rank=2, batch_size=3, out=tmp_path / "lora", device="cpu")
    training = script.Training(config, options)
    with training.loader as loader:
        batch = next(iter(loader))
    state = training.generator.get_state()

    def loss(mask: torch.Tensor | None) -> torch.Tensor:
        training.generator.set_state(state)
        rest = {name: value for name, value in batch.items() if name != "mask"}
        found: torch.Tensor = training.loss(rest if mask is None else {**rest, "mask": mask})
        return found

    mask, latents = batch["mask"], batch["latents"]
    assert torch.equal(loss(torch.full_like(mask, 255)), loss(None)), "to the last bit"
    assert loss(torch.zeros_like(mask)) == 0
    training.generator.set_state(state)
    noise = torch.randn(latents.shape, generator=training.generator)
    index = training.schedule.draw(family.timesteps, len(latents), training.generator)
    noisy, timesteps = training.schedule.noised(latents, noise, index), training.schedule.timesteps[index]
    predicted = family.predict(training.denoiser, noisy, timesteps, batch)
    target = training.schedule.target(latents, noise, index)
    expected = losses_by_hand(predicted, target, weights_of(batch["sample_id"], family.latent.downscale))
    assert 0 < loss(mask).item() == pytest.approx(sum(expected) / 3, rel=1e-6)
