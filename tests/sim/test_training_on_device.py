"""Validation and loading on a second device: encoders come and go, training is restored, and batches are right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.loss_cases import make_cache
from helpers.phase_runs import assert_as_without
from helpers.phase_training import Training
from helpers.runner_runs import precache_training_set, runner_for, validation_config

from latentcache import LatentCache, LatentDataset, LoadedModels, Phases, run_precache
from latentcache.config import Config
from latentcache.loading.loader import LatentLoader
from latentcache.loading.sampler import BucketBatchSampler, noise_generator
from latentcache.models.tiny import tiny_parts

CPU = torch.device("cpu")
EXACT = {"encode.vae_dtype": "float32", "encode.text_dtype": "float32"}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("variant", "encode_on"), [("lora", "auto"), ("ema", "cpu")])
def test_training_goes_on_bit_by_bit_cold_and_warm(
    variant: str, encode_on: str, make_config: Callable[..., Config], photos: Path, device: torch.device
) -> None:
    config = validation_config(lambda: make_config(**{"encode.device": encode_on}), photos)
    precache_training_set(config)

    def validate(training: Training) -> None:
        with LatentCache(config.cache.path) as cache:
            runner = runner_for(training, cache, config)
            cold, warm = runner.run(1), runner.run(2)
        assert cold is not None and warm is not None
        assert cold.num_filled > 0 and warm.num_filled == 0
        assert cold.placement == warm.placement == {"validate": ("unet",), "sample": ("unet",)}
        assert cold.loss == warm.loss
        assert training.phases.on_device() == {"unet"}

    assert_as_without(validate, device, variant)


class Swapped(Training):
    """Some blocks of the UNet wait on the CPU and come for their forward, as in trainers for small cards."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.unet.requires_grad_(False)
        for block in self.unet.up_blocks:
            block.to(CPU)
            block.register_forward_pre_hook(lambda module, _: (module.to(device), None)[1])
            block.register_forward_hook(lambda module, *_: (module.to(CPU), None)[1])
        self.phases = Phases(self.parts, device=device, immovable=("unet",))
        self.phases.start("train")


def test_the_whole_path_on_a_device_gives_the_loss_and_the_images_of_the_cpu(
    make_config: Callable[..., Config], photos: Path, tmp_path: Path, device: torch.device
) -> None:
    """Encoders, a UNet with swapped blocks and the decoder run there, even for a prompt that is encoded late."""
    reports = []
    for where, kind in ((CPU, Training), (device, Swapped)):
        settings = {"encode.device": str(where), "cache.path": tmp_path / where.type, **EXACT}
        config = validation_config(lambda settings=settings: make_config(**settings), photos)
        precache_training_set(config)
        training = kind(where)
        parts = {name: training.parts[name] for name in ("unet", "text_encoder", "text_encoder_2")}
        places = [parameter.device for parameter in training.unet.parameters()]
        seen: dict[str, set[torch.device]] = {name: set() for name in (*parts, "vae")}
        for name, part in {**parts, "vae": training.parts["vae"].decoder}.items():
            part.register_forward_pre_hook(lambda module, _, to=seen[name]: to.add(next(module.parameters()).device))
        with LatentCache(config.cache.path) as cache:
            reports.append(runner_for(training, cache, config).run(1))
        assert seen == {name: {where} for name in seen}
        assert [parameter.device for parameter in training.unet.parameters()] == places
    expected, found = reports
    assert found.num_filled == expected.num_filled > 0 and found.notes == ("unet is not moved: declared immovable",)
    for name, losses in expected.loss.by_sample.items():
        assert found.loss.by_sample[name] == pytest.approx(losses, rel=3e-3)
    for ours, theirs in zip(found.images, expected.images, strict=True):
        image, other = np.asarray(ours.image).astype(int), np.asarray(theirs.image)
        assert other.std() > 1 and np.abs(image - other).max() <= 2


def test_only_the_unet_is_on_the_device_after_training_and_validations(
    device: torch.device, make_config: Callable[..., Config], photos: Path, tmp_path: Path, script: Any
) -> None:
    """The validation set is not cached at first."""
    config = validation_config(make_config, photos, num_timesteps=1)
    precache_training_set(config)
    options = script.Options(
        steps=2, rank=2, batch_size=2, validate_every=1, out=tmp_path / "run", device=str(device), mixed_precision="no"
    )
    result = script.train(config, options)
    assert result["on_device"] == ["unet"] and result["device"] == str(device)
    assert [found["num_filled"] > 0 for found in result["validations"]] == [True, False]
    for found in result["validations"]:
        assert found["placement"] == {"validate": ["unet"], "sample": ["unet"]}
        assert len(found["images"]) == 1


# The loader

TENSORS = ("latents", "prompt_embeds", "pooled_prompt_embeds", "add_time_ids", "loss_weight")
TOLERANCE = {"sim": 0.0, "cuda": 1e-6}


def test_batches_are_those_of_the_cache_with_the_numbers_of_the_cpu(tmp_path: Path, device: torch.device) -> None:
    """Even if batches are held while others arrive."""
    make_cache(tmp_path)
    unet = torch.nn.Linear(1, 1).to(device, torch.bfloat16)
    sampler = BucketBatchSampler(LatentDataset(tmp_path / "cache", "photos"), 2, seed=9)
    with LatentLoader(sampler, device=unet, scaled=True, prefetch=2) as loader:
        held = [*loader]
    on_cpu = [*LatentLoader(sampler, device="cpu", dtype=torch.bfloat16, scaled=True)]
    with LatentCache(tmp_path / "cache", manifest="photos") as cache:
        for planned, batch, other in zip(sampler.plan(0), held, on_cpu, strict=True):
            generator = noise_generator(9, 0, planned.position)
            direct = cache.batch(batch["sample_id"], device=unet, scaled=True, generator=generator)
            assert batch.keys() == direct.keys()
            for name, value in direct.items():
                if name not in TENSORS:
                    assert batch[name] == value
                    continue
                assert batch[name].device == device and batch[name].dtype == value.dtype
                assert torch.equal(batch[name].cpu(), value.cpu()), name
            tolerance = TOLERANCE[device.type]
            torch.testing.assert_close(batch["latents"].cpu(), other["latents"], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("parked", "fails"), [(True, False), (False, True)])
def test_encoding_runs_on_the_device_and_leaves_models_where_they_were(
    tmp_path: Path, device: torch.device, parked: bool, fails: bool
) -> None:
    config = make_cache(tmp_path)
    config = config.model_copy(update={"encode": config.encode.model_copy(update={"device": str(device)})})
    parts, home = tiny_parts(), torch.device("cpu") if parked else device
    modules = {name: part.to(home) for name, part in parts.items() if isinstance(part, torch.nn.Module)}
    run_precache(config, models=LoadedModels(**parts))
    dataset = LatentDataset(tmp_path / "cache", "photos")

    def loader_of(**options: Any) -> LatentLoader:
        return LatentLoader(BucketBatchSampler(dataset, 2, seed=9), device=device, scaled=True, **options)

    expected = [batch["latents"] for batch in loader_of()]
    dataset.cache.store.remove(dataset.cache.manifest("photos").keys())
    seen = []

    def watch(module: torch.nn.Module, *_: Any) -> None:
        seen.append(next(module.parameters()).device)
        if fails and module is parts["vae"].encoder:
            raise RuntimeError("the VAE broke")

    for module in (parts["vae"].encoder, parts["text_encoder"]):
        module.register_forward_pre_hook(watch)
    loader = loader_of(encode=partial(run_precache, config, models=LoadedModels(**parts)))
    if fails:
        with pytest.raises(RuntimeError, match="the VAE broke"):
            iter(loader)
    else:
        for batch, latents in zip(loader, expected, strict=True):
            torch.testing.assert_close(batch["latents"].cpu(), latents.cpu(), rtol=1e-5, atol=1e-5)
    assert {*seen} == {device} and len(seen) >= 2
    assert {parameter.device for module in modules.values() for parameter in module.parameters()} == {home}
