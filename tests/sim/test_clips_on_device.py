"""Clips of image to video on another device: their latents, the condition, and the rows of the first frame."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers.family_runs import family_config, loaded_models
from helpers.tiny_models import wan_2_1_i2v

from latentcache import LatentCache
from latentcache.families import family_named
from latentcache.precache.run import run_precache


def test_all_that_a_clip_has_is_made_on_the_device(device: torch.device, tmp_path: Path) -> None:
    family, parts = family_named("wan-i2v"), wan_2_1_i2v()
    seen: set[torch.device] = set()
    for name in ("vae", "image_encoder"):
        module = parts[name].encoder if name == "vae" else parts[name]
        module.register_forward_pre_hook(lambda module, _: seen.add(next(module.parameters()).device))
    caches = []
    for place in ("cpu", str(device)):
        config = family_config(tmp_path, with_clips=True, device=place)
        config = config.model_copy(update={"cache": config.cache.model_copy(update={"path": tmp_path / place[:3]})})
        seen.clear()
        assert run_precache(config, models=loaded_models(family, parts)).num_refused == 0
        assert seen == {torch.device(place)}
        caches.append(LatentCache(config.cache.path))
    for name in ("0.png", "1.png", "2.png"):
        ours, theirs = (cache.batch([name], device="cpu", dtype=torch.float32) for cache in caches)
        for field in ("latents", "condition", "image_embeds"):
            torch.testing.assert_close(ours[field], theirs[field], rtol=0, atol=2e-2)
    for cache in caches:
        cache.close()
