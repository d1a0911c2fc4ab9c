"""The runner: a validation in the middle of training, on a cold and a warm cache, with training restored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.phase_disturbances import differences, state_of
from helpers.phase_runs import assert_as_without
from helpers.phase_training import Training
from helpers.runner_runs import precache_training_set, runner_for, validation_config

from latentcache import LatentCache, ValidationRunner, Workspace, run_precache, validate
from latentcache.config import Config, DatasetConfig
from latentcache.errors import ConfigError, SampleError, StoreError, TrainableEncoderError
from latentcache.integrations.diffusers import validation_parts
from latentcache.store.disk import DiskStore
from latentcache.validation import runner as runner_module
from latentcache.validation.loss import validation_loss

CPU = torch.device("cpu")


@pytest.fixture
def config(make_config: Callable[..., Config], photos: Path) -> Config:
    return validation_config(make_config, photos)


@pytest.fixture
def cold(config: Config) -> Iterator[LatentCache]:
    precache_training_set(config)
    with LatentCache(config.cache.path) as cache:
        yield cache


@pytest.fixture
def warm(config: Config) -> Iterator[LatentCache]:
    run_precache(config)
    with LatentCache(config.cache.path) as cache:
        yield cache


def without_encoders(training: Training) -> dict[str, Any]:
    """The parts that a run on a warm cache needs."""
    kept = ("unet", "vae", "optimizer", "ema", "scaler")
    return {name: training.parts.get(name) for name in kept} | {"scheduler": training.scheduler}


def test_a_set_with_a_refused_photo_is_whole(config: Config, photos: Path) -> None:
    """A photo that cannot be decoded has keys in the manifest, but never entries."""
    photo = next(photos.glob("*.png"))
    (photos / "cut.png").write_bytes(photo.read_bytes()[:-40])
    assert run_precache(config).failed
    training = Training(CPU)
    with LatentCache(config.cache.path) as cache:
        report = ValidationRunner(without_encoders(training), cache, config).run(1)
        assert report is not None and not any("lost" in note for note in report.notes)
        assert validation_parts(config, cache).keys() == {"vae"}
        report = runner_for(training, cache, config).run(2)
        assert report is not None and not any("refused" in note for note in report.notes), "nothing is tried again"


def test_a_cold_validation_waits_for_a_compaction(cold: LatentCache, config: Config) -> None:
    training = Training(CPU)
    with DiskStore(config.cache.path) as store, ExitStack() as held:
        held.enter_context(store.lock("compact", shared=False))
        threading.Timer(2, held.close).start()
        report = runner_for(training, cold, config).run(1)
    assert report is not None and report.num_filled > 0


@pytest.mark.parametrize("variant", ["ema", "amp", "schedule-free"])
def test_training_goes_on_bit_by_bit_after_a_cold_validation(variant: str, cold: LatentCache, config: Config) -> None:
    """And after one that is interrupted."""
    reports = []

    def validate(training: Training) -> None:
        autocast = torch.float16 if variant == "amp" else None
        runner = runner_for(training, cold, config, autocast=autocast)
        reports.extend([runner.run(1), runner.run(2)])
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(runner_module, "decode_samples", Mock(side_effect=KeyboardInterrupt))
            runner.run(3)

    assert_as_without(validate, CPU, variant)
    first, second = reports
    assert first.num_filled > 0 and second.num_filled == 0
    assert first.loss == second.loss
    assert set(second.loss.by_dataset) == {"held-out"} and second.loss.loss.num == 5 and second.loss.skipped == ()
    [image] = second.images
    assert image.prompt == "a validation prompt" and image.image.size == (96, 64)
    assert [i.image.tobytes() for i in first.images] == [i.image.tobytes() for i in second.images]


def test_the_averaged_weights_are_validated(warm: LatentCache, config: Config) -> None:
    training = Training(CPU, "ema")
    for _ in range(3):
        training.step()
    before = state_of(training)
    report: Any = runner_for(training, warm, config).run(1)
    assert differences(before, state_of(training)) == []
    settings = {"scheduler": training.scheduler, "datasets": ["held-out"], "settings": config.validation}
    own = validation_loss(training.unet.eval(), warm, **settings)
    training.ema.copy_to(training.unet.parameters())
    averaged = validation_loss(training.unet, warm, **settings)
    assert report.loss.by_sample == averaged.by_sample != own.by_sample


def test_only_the_validation_sets_of_its_own_config_are_measured(config: Config) -> None:
    """Though another config's set is in the same cache. Without a set of its own it measures those of its encoders."""
    parts, (photos, held_out) = without_encoders(Training(CPU)), config.datasets
    other, skipped = (held_out.model_copy(update={"name": name}) for name in ("of-another-config", "skipped"))

    def with_sets(*sets: DatasetConfig, **validation: Any) -> Config:
        changed = config.validation.model_copy(update=validation)
        return config.model_copy(update={"datasets": (photos, *sets), "validation": changed})

    def measured(config: Config) -> set[str] | None:
        with LatentCache(config.cache.path) as cache:
            report: Any = ValidationRunner(parts, cache, config).run(1)
        assert len(report.images) == 1
        return None if report.loss is None else {*report.loss.by_dataset}

    run_precache(with_sets())
    assert measured(with_sets()) is None
    with pytest.raises(ConfigError, match="nothing to validate"):
        measured(with_sets(prompts=()))
    run_precache(with_sets(held_out, other))
    encode = config.encode.model_copy(update={"clip_skip": 1})
    run_precache(config.model_copy(update={"datasets": (skipped,), "encode": encode}))
    assert measured(with_sets(held_out)) == {"held-out"}
    assert measured(with_sets()) == {"held-out", "of-another-config"}
    (config.cache.path / "manifests" / "skipped.safetensors").write_bytes(b"damaged")
    assert measured(with_sets(held_out)) == {"held-out"}
    assert {*validate(config).report.loss.by_dataset} == {"held-out"}


def test_the_process_that_validates_fills_the_cache_alone(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    # With torchrun's variables a precache run leaves a share of the work to the other ranks.
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with Workspace() as workspace:
        cache = LatentCache(store=workspace.store, manifests=workspace.manifests)
        report: Any = runner_for(Training(CPU), cache, config).run(1)
    assert report.loss.loss.num == 5 and report.loss.skipped == () and len(report.images) == 1


def test_what_is_not_cached_and_cannot_be_encoded_names_the_command(cold: LatentCache, config: Config) -> None:
    """Without encoders, and with a read-only cache, which is never filled."""
    training, before = Training(CPU), set(config.cache.path.rglob("*"))
    with pytest.raises(StoreError, match=r"held-out is not cached, and text_encoder.*latentcache precache CONFIG"):
        ValidationRunner(without_encoders(training), cold, config).run(1)
    message = r"held-out is not cached, and this cache is open for reading only: run `latentcache precache"
    with LatentCache(config.cache.path, read_only=True) as cache, pytest.raises(StoreError, match=message):
        runner_for(training, cache, config).run(1)
    assert set(config.cache.path.rglob("*")) == before
    run_precache(config)
    cold.store.remove([next(iter(cold.manifest("held-out").rows.values())).images[0].key])
    before = set(config.cache.path.rglob("*"))
    with LatentCache(config.cache.path, read_only=True) as cache:
        report: Any = runner_for(Training(CPU), cache, config).run(1)
        assert len(report.loss.skipped) == 1
        changed = config.validation.model_copy(update={"prompts": ("never seen",)})
        with pytest.raises(SampleError, match="never seen"):
            runner_for(Training(CPU), cache, config.model_copy(update={"validation": changed})).run(2)
    assert set(config.cache.path.rglob("*")) == before


def test_parts_and_settings_that_cannot_work_are_refused_before_the_training(warm: LatentCache, config: Config) -> None:
    with pytest.raises(ConfigError, match="scheduler is missing from unet"):
        ValidationRunner({"unet": Training(CPU).unet}, warm, config)
    with pytest.raises(TrainableEncoderError, match=r"text_encoder\."):
        runner_for(Training(CPU, "text-encoder"), warm, config)
    with pytest.raises(ConfigError, match="SummaryWriter"):
        runner_for(Training(CPU), warm, config, writer=object())
    parts = without_encoders(Training(CPU))
    for changes, of_scheduler, message in (
        ({"scheduler": "AutoencoderKL"}, {}, "validation.scheduler: 'AutoencoderKL' is no"),
        ({"scheduler": "FlowMatchEulerDiscreteScheduler"}, {}, "has no .*which StableDiffusionXLPipeline needs"),
        ({"num_timesteps": 900}, {"num_train_timesteps": 500}, "num_timesteps is 900; the schedule has 500"),
        ({"snr_gamma": 5.0}, {"prediction_type": "flow_prediction"}, "snr_gamma to null"),
    ):
        scheduler = type(parts["scheduler"]).from_config(parts["scheduler"].config, **of_scheduler)
        changed = config.model_copy(update={"validation": config.validation.model_copy(update=changes)})
        with pytest.raises(ConfigError, match=message):
            ValidationRunner(parts | {"scheduler": scheduler}, warm, changed)


class FullyShardedDataParallel(torch.nn.Module):
    """Has the name of FSDP1's wrapper, whose flat parameters look like any others."""


def test_other_ranks_validate_if_sharded(warm: LatentCache, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    training = Training(CPU)
    runner = ValidationRunner(without_encoders(training), warm, config)
    assert runner.run(1) is None
    training.unet.add_module("wrapped", FullyShardedDataParallel())
    report = runner.run(1)
    assert report is not None and report.loss is not None
    assert not config.validation.path.exists()
