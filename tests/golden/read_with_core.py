"""Reads the golden cache with the packages of `pip install latentcache` alone, at their lowest releases but for torch.

tests/test_programs.py runs this program in an environment that has nothing else, the lane `floor` on the oldest Python
and torch. A test of loading runs it where the other packages are there and cannot be imported.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from typing import get_args

import torch
from golden_contents import contents
from torch.utils.data import DataLoader

from latentcache import (
    BucketBatchSampler,
    CachedBatches,
    LatentCache,
    LatentDataset,
    LatentLoader,
    Phases,
    audit,
    guard,
    repair_optimizer,
)
from latentcache.errors import ExtraMissingError
from latentcache.families import FamilyName, family_named
from latentcache.store.upkeep import rebuild, verify
from latentcache.utils.extras import EXTRAS

HERE = Path(__file__).parent


def read(cache: Path) -> None:
    """Read `cache` in every way that a trainer does."""
    assert all(family_named(name).fields for name in get_args(FamilyName))
    expected = json.loads((HERE / "format2.json").read_text(encoding="utf-8"))
    assert contents(cache) == expected
    shutil.rmtree(cache / "index")
    rebuild(cache)
    assert contents(cache) == expected and verify(cache).ok
    with LatentCache(cache) as opened:
        ids = ["a.png", "sub/b.png"]
        assert opened.batch(ids, device="cpu", output="moments")["moments"].shape == (2, 8, 8, 8)
        drawn = opened.batch(ids, device="cpu", scaled=True, generator=torch.Generator().manual_seed(0))
        assert drawn["latents"].shape == (2, 4, 8, 8)
    dataset = LatentDataset(cache, flips=True, caption="random")
    sampler = BucketBatchSampler(dataset, 2, seed=0)
    unet = torch.nn.Linear(1, 1)
    with LatentLoader(sampler, device=unet, scaled=True) as loader:
        batches = list(loader)
    loaded = DataLoader(CachedBatches(sampler), num_workers=1, collate_fn=lambda items: items[0])
    assert [batch["sample_id"] for batch in loaded] == [batch["sample_id"] for batch in batches]
    optimizer = torch.optim.AdamW(unet.parameters())
    with guard(unet):
        unet(torch.zeros(1, 1)).sum().backward()
    optimizer.step()
    repair_optimizer(optimizer)
    phases = Phases({"unet": unet, "optimizer": optimizer}, device="cpu")
    phases.start()
    with phases.enter("validate"):
        assert not unet.training
    assert unet.training and not audit({"unet": unet, "optimizer": optimizer}, device="cpu").errors


def main() -> None:
    there = [name for name in (*EXTRAS["encode"], *EXTRAS["cli"]) if importlib.util.find_spec(name) is not None]
    assert not there, f"this environment has packages that reading must do without: {there}"
    with tempfile.TemporaryDirectory() as folder:
        read(Path(shutil.copytree(HERE / "format2", Path(folder, "cache"))))
    try:
        from latentcache import run_precache  # noqa: F401
    except ExtraMissingError as error:
        print(f"the golden cache was read; encoding: {error}")
    else:
        raise AssertionError("run_precache was imported without the packages that it needs")


if __name__ == "__main__":
    main()
