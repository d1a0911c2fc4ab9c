"""Masks in the loss, as validation and the training script compute it: against sums by hand."""

from __future__ import annotations

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
from latentcache.families import family_named
from latentcache.families.base import Family
from latentcache.precache.run import run_precache
from latentcache.validation.loss import validation_loss
from latentcache.validation.noise_schedule import NoiseSchedule

pytestmark = pytest.mark.families

MASKS = {name: np.full((SIDE, SIDE), value, np.uint8) for name, value in (("0.png", 0), ("1.png", 255), ("2.png", 0))}
MASKS["0.png"][:, SIDE // 2 :] = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE // 2))
MIXED, WHITE, BLACK = MASKS
"""The photos, by what their masks are. Of the mixed one the left half does not count, the right half by its greys."""
LAYOUTS = ("sdxl", "flux2", "wan", "qwen-image-21")
"""One family for each layout of latents: what a mask does to a loss depends on nothing else of it."""


def loss_by_hand(predicted: torch.Tensor, target: torch.Tensor, downscale: int) -> float:
    """Of the mixed sample, in double precision, on latents as the VAE has them."""
    errors, rows = (predicted - target).double().square(), SIDE // downscale
    if errors.shape[-1] != rows:
        errors = diffusers.Flux2Pipeline._unpatchify_latents(errors)
    weights = np.floor(MASKS[MIXED].reshape(rows, downscale, rows, downscale).mean(axis=(1, 3)) + 0.5) / 255
    return float((errors.reshape(-1, rows, rows) * torch.from_numpy(weights)).mean())


@pytest.fixture(params=LAYOUTS, scope="module")
def cached(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Family, Any, Config]:
    """The family, its tiny parts, and a config of the photos with masks and without."""
    folder, family = tmp_path_factory.mktemp("masked"), family_named(request.param)
    (folder / "masks").mkdir()
    for name, pixels in MASKS.items():
        Image.fromarray(pixels).save(folder / "masks" / name)
    model, masked = {"model.path": tiny_folder(family.name)}, {"name": "masked", "mask": {"path": folder / "masks"}}
    config = family_config(folder, {**model, **{f"datasets.0.{name}": value for name, value in masked.items()}})
    datasets = (*config.datasets, *family_config(folder).datasets)
    parts, config = tiny_model(family.name), config.model_copy(update={"datasets": datasets})
    report = run_precache(config, models=loaded_models(family, parts))
    assert report.num_refused == 0 and report.misses_by_reason["mask: new"] == 3
    return family, parts, config


def test_the_validation_loss_counts_as_its_masks_say(cached: tuple[Family, Any, Config]) -> None:
    family, parts, config = cached
    schedule, denoiser = NoiseSchedule.of(parts["scheduler"]), parts[family.denoiser]
    given: dict[str, Any] = {"scheduler": parts["scheduler"], "datasets": ["photos", "masked"]}
    alone, together = (ValidationConfig(num_timesteps=1, batch_size=batch_size) for batch_size in (1, 4))
    with LatentCache(config.cache) as cache:
        found = validation_loss(denoiser, cache, settings=alone, **given).by_sample
        in_one_batch = validation_loss(denoiser, cache, settings=together, **given).by_sample
        batch = cache.restricted("masked").batch([MIXED], device="cpu", scaled=True)
    assert found["masked"][WHITE] == found["photos"][WHITE] > 0, "to the last bit"
    assert found["masked"][BLACK] == 0 < found["photos"][BLACK]
    index, latents = timestep_of(MIXED, 0, 1000), batch["latents"]
    noise, at = noise_of(MIXED, index, latents), torch.tensor([index])
    with torch.no_grad():
        noisy = schedule.noised(latents, noise, at)
        predicted = family.predict(denoiser, noisy, schedule.timesteps[at], batch)
    expected = loss_by_hand(predicted, schedule.target(latents, noise, at), family.latent.downscale)
    assert found["masked"][MIXED] == pytest.approx(expected, rel=1e-6)
    assert found["masked"][MIXED] < 0.6 * found["photos"][MIXED]
    assert in_one_batch["masked"] == pytest.approx(found["masked"], rel=1e-4)


def test_the_training_loss_counts_as_its_masks_say(
    cached: tuple[Family, Any, Config], script: Any, tmp_path: Any
) -> None:
    """By the same function, in each layout."""
    _, _, config = cached
    config = config.model_copy(update={"datasets": config.datasets[:1]})
    training = script.Training(config, script.Options(rank=2, batch_size=3, out=tmp_path / "lora", device="cpu"))
    with training.loader as loader:
        batch = next(iter(loader))
    state = training.generator.get_state()

    def loss(**changed: torch.Tensor) -> float:
        training.generator.set_state(state)
        found: float = training.loss({**batch, **changed}).item()
        return found

    whole = loss(mask=torch.full_like(batch["mask"], 255))
    assert loss(mask=torch.zeros_like(batch["mask"])) == 0 < loss() < 0.6 * whole
    del batch["mask"]
    assert loss() == whole, "to the last bit"
