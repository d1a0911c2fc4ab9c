"""Masks and control images in the losses. Control images that a denoiser does not read are refused early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from helpers.family_runs import SIDE, family_config, loaded_models
from helpers.loss_cases import noise_of, timestep_of
from helpers.photo_files import write_mask, write_photo
from helpers.tiny_configs import tiny_config
from helpers.tiny_models import tiny_folder, tiny_model
from PIL import Image

from latentcache import LatentCache, ValidationRunner, masked_errors, validate
from latentcache.config import Config, ValidationConfig
from latentcache.errors import ConfigError, StoreError
from latentcache.families import family_named
from latentcache.precache.run import run_precache
from latentcache.validation.loss import validation_loss
from latentcache.validation.metrics import LossReport, paired_difference
from latentcache.validation.noise_schedule import NoiseSchedule

NAMES = [f"{number}.png" for number in range(4)]
UNREAD = r"pairs: has control images, but the denoiser of sdxl does not read them \(that of flux, qwen-image-edit"


def config_of(folder: Path, family: str, **changes: Any) -> Config:
    """Images of one bucket, with a mask and two control images. The second control images are in two buckets."""
    control = [{"path": folder / "first"}, {"path": folder / "second", "area": 64 * 64}]
    dataset = {"name": "pairs", "role": "validation", "source": {"path": folder / "after"}, "control": control}
    dataset |= {"buckets": {"area": 64 * 64, "step": 32, "max_aspect": 4.0}, "mask": {"path": folder / "masks"}}
    return tiny_config(
        folder,
        **{f"datasets.0.{name}": value for name, value in {**dataset, **changes}.items()},
        model={"path": tiny_folder(family), "family": family},
        validation={"num_timesteps": 1, "path": folder / "validation"},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(NAMES):
        write_photo(tmp_path / "after" / name, number, (64, 64))
        write_photo(tmp_path / "first" / name, 10 + number, (32, 32))
        write_photo(tmp_path / "second" / name, 20 + number, (64, 64) if number % 2 else (64, 160))
        write_mask(tmp_path / "masks" / name, number, (64, 64))
    return tmp_path


def loss(config: Config, parts: dict[str, Any], batch_size: int) -> LossReport:
    settings = ValidationConfig(num_timesteps=2, batch_size=batch_size)
    with LatentCache(config.cache) as cache:
        return validation_loss(parts["transformer"], cache, scheduler=parts["scheduler"], settings=settings)


def test_control_images_of_unequal_shapes_and_masks_are_measured_in_batches(folder: Path) -> None:
    family, config = family_named("flux"), config_of(folder, "flux")
    parts = tiny_model(family.name)
    models = loaded_models(family, parts)
    assert run_precache(config, models=models).notes == []
    calls: list[tuple[int, ...]] = []
    parts["transformer"].register_forward_pre_hook(
        lambda module, arguments, options: calls.append(tuple(options["hidden_states"].shape[:2])), with_kwargs=True
    )
    one, two = loss(config, parts, 1), loss(config, parts, 3)
    # The image and the first control image have 16 tokens each, the second one 16 or 12.
    assert calls[:8] == [(1, 44)] * 4 + [(1, 48)] * 4
    assert calls[8:] == [(3, 44), (1, 44), (3, 48), (1, 48)]
    assert two.by_sample["pairs"] == pytest.approx(one.by_sample["pairs"], rel=1e-4)
    assert one.skipped == two.skipped == () and set(one.by_sample["pairs"]) == set(NAMES)

    write_mask(folder / "masks" / NAMES[0], 99, (64, 64))
    run_precache(config, models=models)
    masked = loss(config, parts, 1)
    assert {name for name in NAMES if masked.by_sample["pairs"][name] != one.by_sample["pairs"][name]} == {NAMES[0]}
    write_photo(folder / "second" / NAMES[1], 99, (64, 64))
    run_precache(config, models=models)
    edited = loss(config, parts, 1)
    assert {name for name in NAMES if edited.by_sample["pairs"][name] != masked.by_sample["pairs"][name]} == {NAMES[1]}
    for earlier, later in ((one, masked), (masked, edited)):
        with pytest.raises(ConfigError, match="compared: dataset pairs has other samples, captions or encoders"):
            paired_difference(later, earlier)


def test_control_images_that_nobody_reads_are_refused(folder: Path, script: Any) -> None:
    config = config_of(folder, "sdxl")
    report = run_precache(config)
    assert report.num_refused == 0, "the user's own code may read them"
    note = "pairs: control images are cached for your own code only: the denoiser of sdxl"
    assert f"note      {note}" in report.to_text()

    options = script.Options(out=folder / "lora", device="cpu")
    for changes in ({}, {"control": []}):  # removed, and not precached again yet
        with pytest.raises(ConfigError, match=UNREAD):
            validate(config_of(folder, "sdxl", **changes))
        with pytest.raises(ConfigError, match=UNREAD):
            script.Training(config_of(folder, "sdxl", **changes, role="train"), options)
    parts = tiny_model("sdxl")
    with LatentCache(config.cache) as cache, pytest.raises(ConfigError, match=UNREAD):
        validation_loss(parts["unet"], cache, scheduler=parts["scheduler"])

    # Without control images in the config and in the cache nothing is refused.
    run_precache(removed := config_of(folder, "sdxl", control=[]))
    with LatentCache(config.cache) as cache:
        ValidationRunner(parts, cache, removed)
        with pytest.raises(ConfigError, match=UNREAD):
            ValidationRunner(parts, cache, config)


@pytest.mark.parametrize("shape", [(2, 16, 64), (2, 4, 4, 8), (1, 4, 8, 8)])
def test_errors_of_another_layout_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(StoreError, match=r"the mask is \[2, 1, 8, 8\]: give errors \[B, C, h, w\]"):
        masked_errors(torch.ones(shape), {"mask": torch.ones(2, 1, 8, 8, dtype=torch.uint8)})


# Masks in each layout of latents, compared with sums by hand

MASKS = {name: np.full((SIDE, SIDE), value, np.uint8) for name, value in (("0.png", 0), ("1.png", 255), ("2.png", 0))}
MASKS["0.png"][:, SIDE // 2 :] = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE // 2))
MIXED, WHITE, BLACK = MASKS
"""Photos, named by their masks. The mixed mask is black in its left half, and has all greys in its right half."""
LAYOUTS = ("sdxl", "flux2", "wan", "qwen-image-21")
"""One family for each layout of latents, because nothing else of a family affects masks."""


def loss_by_hand(predicted: torch.Tensor, target: torch.Tensor, downscale: int) -> float:
    """The loss of the mixed sample, in double precision, in the VAE's layout of latents."""
    errors, rows = (predicted - target).double().square(), SIDE // downscale
    if errors.shape[-1] != rows:
        errors = diffusers.Flux2Pipeline._unpatchify_latents(errors)
    weights = np.floor(MASKS[MIXED].reshape(rows, downscale, rows, downscale).mean(axis=(1, 3)) + 0.5) / 255
    return float((errors.reshape(-1, rows, rows) * torch.from_numpy(weights)).mean())


@pytest.mark.extended
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_losses_count_as_their_masks_say(name: str, script: Any, tmp_path: Path) -> None:
    family, parts = family_named(name), tiny_model(name)
    (tmp_path / "masks").mkdir()
    for photo, pixels in MASKS.items():
        Image.fromarray(pixels).save(tmp_path / "masks" / photo)
    changes = {"model.path": tiny_folder(name), "datasets.0.name": "masked", "datasets.0.mask.path": tmp_path / "masks"}
    config = family_config(tmp_path, changes)
    both = config.model_copy(update={"datasets": (*config.datasets, *family_config(tmp_path).datasets)})
    report = run_precache(both, models=loaded_models(family, parts))
    assert report.num_refused == 0 and report.misses_by_reason["mask: new"] == 3

    # The validation loss
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

    # The loss of the training script, by the same function
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
