"""The loader on a second device: what the dataset places there, with streams where there are some."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.loss_cases import make_cache

from latentcache import LatentCache, LatentDataset, LoadedModels, run_precache
from latentcache.loading.loader import LatentLoader
from latentcache.loading.sampler import BucketBatchSampler, noise_generator
from latentcache.models.tiny import tiny_parts

TENSORS = ("latents", "prompt_embeds", "pooled_prompt_embeds", "add_time_ids", "loss_weight")
TOLERANCE = {"sim": 0.0, "cuda": 1e-6}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loader")
    make_cache(folder)
    return folder / "cache"


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_are_those_of_the_cache(path: Path, device: torch.device, prefetch: int) -> None:
    unet = torch.nn.Linear(1, 1).to(device, torch.bfloat16)
    sampler = BucketBatchSampler(LatentDataset(path, "photos"), 2, seed=9)
    with LatentLoader(sampler, device=unet, scaled=True, prefetch=prefetch) as loader:
        held = [*loader]
    with LatentCache(path, manifest="photos") as cache:
        for planned, batch in zip(sampler.plan(0), held, strict=True):
            generator = noise_generator(9, 0, planned.position)
            direct = cache.batch(batch["sample_id"], device=unet, scaled=True, generator=generator)
            assert batch.keys() == direct.keys()
            for name, value in direct.items():
                if name not in TENSORS:
                    assert batch[name] == value
                    continue
                assert batch[name].device == device and batch[name].dtype == value.dtype
                assert torch.equal(batch[name].cpu(), value.cpu()), name


def test_the_numbers_are_those_of_the_cpu(path: Path, device: torch.device) -> None:
    def latents(requester: torch.device | str) -> list[torch.Tensor]:
        sampler = BucketBatchSampler(LatentDataset(path, "photos"), 2, seed=9)
        return [batch["latents"].cpu() for batch in LatentLoader(sampler, device=requester, scaled=True)]

    for here, there in zip(latents("cpu"), latents(device), strict=True):
        torch.testing.assert_close(there, here, rtol=TOLERANCE[device.type], atol=TOLERANCE[device.type])


def test_held_batches_stay_as_they_are(path: Path, device: torch.device) -> None:
    sampler = BucketBatchSampler(LatentDataset(path, "photos"), 1)
    loader = LatentLoader(sampler, device=device, output="moments")
    held, copies = [], []
    for batch in loader.forever():
        assert all(torch.equal(one, other) for one, other in zip(held, copies, strict=True))
        held.append(batch["moments"])
        copies.append(batch["moments"].clone())
        if len(held) == 30:
            break


@pytest.mark.parametrize("parked", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_encoding_runs_on_the_device_and_leaves_models_where_they_were(
    tmp_path: Path, device: torch.device, parked: bool, fails: bool
) -> None:
    config = make_cache(tmp_path)
    config = config.model_copy(update={"encode": config.encode.model_copy(update={"device": str(device)})})
    parts = tiny_parts()
    home = torch.device("cpu") if parked else device
    modules = {name: part.to(home) for name, part in parts.items() if isinstance(part, torch.nn.Module)}
    run_precache(config, models=LoadedModels(**parts))
    dataset = LatentDataset(tmp_path / "cache", "photos")
    unet = torch.nn.Linear(1, 1).to(device)

    def loader_of(**options: Any) -> LatentLoader:
        return LatentLoader(BucketBatchSampler(dataset, 2, seed=9), device=unet, scaled=True, **options)

    expected = [batch["latents"] for batch in loader_of()]
    dataset.cache.store.remove(dataset.cache.manifest("photos").rows.entry_keys())
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
