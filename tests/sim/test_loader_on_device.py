"""The loader on a second device: its batches there, with streams if the device has any."""

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


def test_batches_are_those_of_the_cache_with_the_numbers_of_the_cpu(tmp_path: Path, device: torch.device) -> None:
    """Including batches that are held while others are loaded."""
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
