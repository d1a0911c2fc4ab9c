"""Reading a cache needs no package of those that encode: a trainer may have other releases of them, or none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from latentcache.config import Config
from latentcache.precache.run import run_precache

READ = """
import sys
from typing import get_args

ENCODERS = {"diffusers", "transformers", "accelerate", "safetensors", "PIL"}

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ENCODERS:
            raise ModuleNotFoundError(f"{name} was imported")

sys.meta_path.insert(0, Blocked())

import torch
from torch.utils.data import DataLoader

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader
from latentcache import Phases, audit, guard, repair_optimizer
from latentcache.families import FamilyName, family_named
from latentcache.store.upkeep import rebuild, verify

for name in get_args(FamilyName):
    family_named(name)
assert all(map(callable, (audit, guard, repair_optimizer, Phases)))
path, holds_moments = sys.argv[1], sys.argv[2] == "moments"
with LatentCache(path, manifest="photos") as cache:
    ids = ["a.png", "b.png"]
    assert cache.batch(ids, device="cpu", scaled=True)["latents"].shape == (2, 4, 8, 16)
    if holds_moments:
        assert cache.batch(ids, device="cpu", output="moments")["moments"].shape == (2, 8, 8, 16)
        assert cache.batch(ids, device="cpu", generator=torch.Generator().manual_seed(0))["latents"].shape[1] == 4
with LatentCache(path) as cache:
    key = next(iter(cache.store.keys()))
    assert cache.get(key).record.key == key
    assert cache.prompt("a validation prompt", device="cpu")["prompt_embeds"].shape[1] == 77
assert rebuild(path).num_packs and verify(path).ok
dataset = LatentDataset(path, "photos", flips=True, caption="random")
sampler = BucketBatchSampler(dataset, 2, seed=0)
assert sum(len(batch["sample_id"]) for batch in LatentLoader(sampler, device="cpu")) == 10
for batch in DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate):
    draw = torch.Generator().manual_seed(0) if holds_moments else None
    assert dataset.place(batch, device="cpu", generator=draw)["latents"].shape[1] == 4
assert not ENCODERS & {name.partition(".")[0] for name in sys.modules}
"""


@pytest.mark.parametrize("output", ["moments", "mean", "sample"])
def test_batches_and_prompts_need_none_of_the_encoders_packages(
    make_config: Callable[..., Config], output: str
) -> None:
    config = make_config(**{"encode.image_output": output, "datasets.0.flip": True})
    run_precache(config)
    path = [str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, "-c", READ, str(config.cache.path), output]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
