"""A small cached validation set, and the expected loss of its samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from diffusers import EulerDiscreteScheduler
from helpers.photo_files import write_photo
from helpers.tiny_configs import tiny_config

from latentcache import LatentCache
from latentcache.config import Config
from latentcache.precache.run import run_precache

WIDE, TALL = (64, 96), (96, 64)
PHOTOS = {"a.png": WIDE, "b.png": TALL, "c.png": WIDE, "d.png": TALL, "e.png": WIDE}
OTHERS = {"a.png": TALL, "z.png": WIDE}
SCHEDULER = EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")


def make_cache(folder: Path) -> Config:
    """Datasets `photos` (5 samples in 2 buckets), `others` (2, one sample_id of `photos`) and `training`."""
    datasets = []
    for first_seed, (name, role, sizes) in enumerate(
        [("photos", "validation", PHOTOS), ("others", "validation", OTHERS), ("training", "train", {"t.png": WIDE})]
    ):
        for number, (file, size) in enumerate(sizes.items()):
            path = write_photo(folder / name / file, 100 * first_seed + number, size)
            path.with_suffix(".txt").write_text(f"{name} {number}")
        source = {"kind": "folder", "path": folder / name}
        buckets, images = {"area": 64 * 96, "step": 32}, {"min_side": 8}
        datasets.append({"name": name, "role": role, "source": source, "buckets": buckets, "images": images})
    run_precache(config := tiny_config(folder, datasets=datasets, validation={}, **{"encode.num_workers": 1}))
    return config


def seed_of(*parts: str | int) -> int:
    """The first 64 bits of the BLAKE3 digest of the parts as compact JSON, which is the published rule."""
    return int(blake3(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()[:16], 16)


def timestep_of(sample_id: str, first: int, end: int, *, seed: int = 0) -> int:
    """The sample's timestep in [first, end)."""
    return first + (seed_of("timesteps", seed, sample_id) * (end - first) >> 64)


def noise_of(sample_id: str, timestep: int, latents: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
    """The noise of the sample at this timestep, in the shape of its latents [1, C, h, w]."""
    generator = torch.Generator().manual_seed(seed_of("noise", seed, sample_id, timestep))
    return torch.randn(latents.shape, generator=generator)


def read_sample(cache: LatentCache, sample_id: str, *, dataset: str = "photos") -> dict[str, Any]:
    """The scaled latents and the embeddings of one sample, in float32 on the CPU."""
    with LatentCache(cache.path, manifest=dataset, read_only=True) as view:
        return view.batch([sample_id], device="cpu", dtype=torch.float32, scaled=True)


def predict(unet: torch.nn.Module, noisy: torch.Tensor, timestep: torch.Tensor, sample: dict[str, Any]) -> torch.Tensor:
    """The UNet's prediction, called like in diffusers' SDXL scripts."""
    conditions = {"text_embeds": sample["pooled_prompt_embeds"], "time_ids": sample["add_time_ids"]}
    with torch.no_grad():
        return unet(noisy, timestep, sample["prompt_embeds"], added_cond_kwargs=conditions).sample
