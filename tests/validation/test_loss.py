"""The validation loss: its value, and what it does and does not depend on."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_snr
from helpers.loss_cases import PHOTOS, SCHEDULER, make_cache, noise_of, predict, read_sample, timestep_of
from helpers.pack_damage import damage

from latentcache import LatentCache
from latentcache.config import ValidationConfig
from latentcache.errors import ConfigError, StoreError
from latentcache.models.tiny import tiny_denoiser
from latentcache.validation.loss import BATCH_SIZE_TOLERANCE, validation_loss
from latentcache.validation.metrics import Estimate, LossReport, paired_difference

FEW = ValidationConfig(num_timesteps=2)
EDGES = [(0, 500), (500, 1000)]
TIMESTEPS_OF_A = [404, 904]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loss")
    make_cache(folder)
    return folder


@pytest.fixture
def cache(folder: Path) -> Iterator[LatentCache]:
    with LatentCache(folder / "cache", read_only=True) as cache:
        yield cache


@pytest.fixture
def own_cache(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder / "cache", tmp_path / "cache")


@pytest.fixture(scope="module")
def unet() -> torch.nn.Module:
    return tiny_denoiser(1).eval()


def losses_of(report: LossReport) -> dict[tuple[str, str], float]:
    return {(name, key): loss for name, losses in report.by_sample.items() for key, loss in losses.items()}


@pytest.mark.parametrize(
    ("prediction_type", "snr_gamma"),
    [
        *(("epsilon", None), ("v_prediction", None), ("sample", None), ("flow_prediction", None)),
        *(("epsilon", 0.5), ("v_prediction", 0.5), ("sample", 0.5)),
    ],
)
def test_the_loss_of_a_sample_is_what_the_training_scripts_compute(
    cache: LatentCache, unet: torch.nn.Module, prediction_type: str, snr_gamma: float | None
) -> None:
    flow = prediction_type == "flow_prediction"
    ddpm = DDPMScheduler.from_config(SCHEDULER.config, prediction_type="epsilon" if flow else prediction_type)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0) if flow else ddpm
    settings = ValidationConfig(num_timesteps=2, snr_gamma=snr_gamma)
    found = validation_loss(unet, cache, scheduler=scheduler, datasets=["photos"], settings=settings)
    for sample_id in ("a.png", "b.png"):
        sample, losses = read_sample(cache, sample_id), []
        latents = sample["latents"]
        for first, end in EDGES:
            index = torch.tensor([timestep_of(sample_id, first, end)])
            noise = noise_of(sample_id, index.item(), latents)
            if flow:
                sigma = scheduler.sigmas.flip(0)[index].item()
                noisy, target = (1 - sigma) * latents + sigma * noise, noise - latents
                timestep = torch.tensor([1000 * sigma])
            else:
                noisy, timestep = ddpm.add_noise(latents, noise, index), index
                velocity = ddpm.get_velocity(latents, noise, index)
                target = {"epsilon": noise, "v_prediction": velocity, "sample": latents}[prediction_type]
            loss = F.mse_loss(predict(unet, noisy, timestep, sample), target).item()
            if snr_gamma is not None:
                snr = compute_snr(ddpm, index).item()
                divisor = {"epsilon": snr, "v_prediction": snr + 1, "sample": 1.0}[prediction_type]
                loss *= min(snr, snr_gamma) / divisor
            losses.append(loss)
        assert found.by_sample["photos"][sample_id] == pytest.approx(np.mean(losses), rel=1e-5)


@DTYPES
def test_noise_and_timesteps_never_change(cache: LatentCache, dtype: torch.dtype) -> None:
    """With other numbers a run's earlier validations would be worthless. Noise is added in float32."""
    assert [timestep_of("a.png", *edges) for edges in EDGES] == TIMESTEPS_OF_A
    unet, seen = tiny_denoiser(1).eval().to(dtype), []
    for parameter in unet.conv_out.parameters():  # it predicts zeros
        torch.nn.init.zeros_(parameter)
    unet.register_forward_pre_hook(lambda module, given: seen.append((*given[:2], torch.is_grad_enabled())))
    one_by_one = ValidationConfig(num_timesteps=2, batch_size=1)
    report = validation_loss(unet, cache, scheduler=SCHEDULER, datasets=["photos"], settings=one_by_one)
    latents, losses = read_sample(cache, "a.png")["latents"], []
    ddpm = DDPMScheduler.from_config(SCHEDULER.config)
    for expected, (noisy, timestep, has_gradients) in zip(TIMESTEPS_OF_A, seen, strict=False):
        assert timestep.tolist() == [expected] and not has_gradients
        noise = noise_of("a.png", expected, latents)
        assert noisy.equal(ddpm.add_noise(latents, noise, timestep).to(dtype))
        losses.append(noise.square().mean().item())
    assert report.by_sample["photos"]["a.png"] == pytest.approx(np.mean(losses), rel=1e-6)


@DTYPES
def test_the_batch_size_does_not_matter(cache: LatentCache, dtype: torch.dtype) -> None:
    unet = tiny_denoiser(1).eval().to(dtype)
    one, *others = (
        validation_loss(unet, cache, scheduler=SCHEDULER, settings=ValidationConfig(num_timesteps=3, batch_size=size))
        for size in (1, 3, 8)
    )
    assert one.measurement_settings.dtype == str(dtype).removeprefix("torch.")
    for report in others:
        assert report.measurement_settings == one.measurement_settings
        assert losses_of(report) == pytest.approx(losses_of(one), rel=BATCH_SIZE_TOLERANCE[dtype])


def test_order_of_the_manifest_and_other_draws_do_not_matter(own_cache: Path, unet: torch.nn.Module) -> None:
    with LatentCache(own_cache) as cache:
        one = validation_loss(unet, cache, scheduler=SCHEDULER, settings=FEW)
        for name in ("photos", "others"):
            manifest = cache.manifests.read(name)
            cache.manifests.write(replace(manifest, rows=dict(reversed([*manifest.rows.items()]))))
    torch.manual_seed(7), np.random.seed(7)
    with LatentCache(own_cache) as cache:
        assert list(cache.manifest("photos").rows) == sorted(PHOTOS, reverse=True)
        assert validation_loss(unet, cache, scheduler=SCHEDULER, settings=FEW) == one


def test_autocast_is_the_given_one_else_the_surrounding_one(cache: LatentCache, unet: torch.nn.Module) -> None:
    """Autocast caches casts of weights, so without care an in-place swap of EMA weights would not be measured."""
    unet, sample = copy.deepcopy(unet), read_sample(cache, "a.png")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        predict(unet, sample["latents"], torch.tensor([5]), sample)
        with torch.no_grad():
            for parameter in unet.parameters():
                parameter.mul_(1.5)
        around = validation_loss(unet, cache, scheduler=SCHEDULER, settings=FEW)
        assert torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
    plain = validation_loss(unet, cache, scheduler=SCHEDULER, settings=FEW)
    given = validation_loss(unet, cache, scheduler=SCHEDULER, settings=FEW, autocast=torch.bfloat16)
    assert given == around and losses_of(given) != losses_of(plain)
    assert [report.measurement_settings.autocast for report in (plain, given)] == [None, "bfloat16"]
    with pytest.raises(ConfigError, match="autocast is None in one and 'bfloat16' in the other"):
        paired_difference(plain, given)


def test_damaged_samples_are_skipped(own_cache: Path, unet: torch.nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    settings = ValidationConfig(num_timesteps=3, batch_size=2)
    with LatentCache(own_cache) as cache:
        whole = validation_loss(unet, cache, scheduler=SCHEDULER, settings=settings)
        image = cache.get(cache.manifests.read("photos").rows["c.png"].images[0].key)
        damage(cache.path, image.tensors["moments"].numpy().tobytes()[:64])
        cache.store.remove([cache.manifest("others").rows["z.png"].captions[0].key])
    with LatentCache(own_cache, read_only=True) as cache, caplog.at_level(logging.WARNING, "latentcache"):
        found = validation_loss(unet, cache, scheduler=SCHEDULER, settings=settings)
    skipped = [("others", "z.png"), ("photos", "c.png")]
    assert [(each.dataset, each.sample_id) for each in found.skipped] == skipped
    assert "has no entry" in found.skipped[0].reason and "is damaged" in found.skipped[1].reason
    assert str(own_cache) in caplog.text, "what to run names the cache"
    expected = {key: loss for key, loss in losses_of(whole).items() if key not in skipped}
    assert losses_of(found) == pytest.approx(expected, rel=BATCH_SIZE_TOLERANCE[torch.float32])
    assert found.loss.num == 5 and {part.num for part in found.by_timestep} == {5}
    assert paired_difference(found, whole).num == 5, "a skipped sample does not change the measurement settings"


def test_datasets_are_named(cache: LatentCache, unet: torch.nn.Module) -> None:
    def measured(datasets: list[str] | None, cache: LatentCache = cache) -> set[str]:
        return {*validation_loss(unet, cache, scheduler=SCHEDULER, datasets=datasets, settings=FEW).by_sample}

    assert measured(["training", "training"]) == {"training"}
    assert measured(None, cache.restricted("others")) == {"others"}
    prompts = [name for name in cache.manifests.names() if name.startswith("validation-prompts")]
    for datasets, view, message in (
        (["nonsense"], cache, r"no manifest 'nonsense'; there are: .*photos"),
        ([], cache, "datasets is empty"),
        (prompts, cache, "holds prompts, not images"),
        (None, cache.restricted("training"), r"no manifest has the role validation; there are: training \(train\)\."),
    ):
        with pytest.raises(StoreError, match=message):
            measured(datasets, view)


def test_the_paired_difference_is_that_of_each_sample(cache: LatentCache, unet: torch.nn.Module) -> None:
    better = copy.deepcopy(unet)
    torch.nn.init.zeros_(better.conv_out.weight)
    one, other = (validation_loss(model, cache, scheduler=SCHEDULER, settings=FEW) for model in (unet, better))
    values = [loss - losses_of(other)[key] for key, loss in losses_of(one).items()]
    assert paired_difference(one, other) == Estimate.of(values) and len({*values}) == 7
    assert paired_difference(one, one) == Estimate(mean=0.0, standard_error=0.0, num=7)
