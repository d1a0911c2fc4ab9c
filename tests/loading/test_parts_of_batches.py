"""Batches of samples of several parts: control images and masks come with their images, by every way of reading."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.photo_files import write_photo
from helpers.tiny_configs import tiny_config
from PIL import Image
from torch.utils.data import default_collate

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader
from latentcache.config import Config, location_of
from latentcache.dataset.row_table import RowTable
from latentcache.errors import SampleError, StoreError
from latentcache.precache.run import run_precache

NAMES = [f"{number}.png" for number in range(4)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Four images of one bucket. Their second control images have buckets of their own, of two shapes."""
    folder = tmp_path_factory.mktemp("pairs")
    for number, name in enumerate(NAMES):
        write_photo(folder / "after" / name, number, (64, 64))
        write_photo(folder / "first" / name, 10 + number, (32, 32))
        write_photo(folder / "second" / name, 20 + number, (64, 64) if number < 2 else (64, 160))
        mask = np.random.default_rng(number).integers(0, 256, (64, 64), dtype=np.uint8)
        (folder / "masks").mkdir(exist_ok=True)
        Image.fromarray(mask).save(folder / "masks" / name)
    control = [{"path": folder / "first"}, {"path": folder / "second", "area": 64 * 64}]
    dataset = {"name": "pairs", "source": {"path": folder / "after"}, "control": control, "flip": True}
    dataset |= {"buckets": {"area": 64 * 64, "step": 32, "max_aspect": 4.0}, "mask": {"path": folder / "masks"}}
    config = tiny_config(folder, **{f"datasets.0.{name}": value for name, value in dataset.items()})
    assert run_precache(config).num_refused == 0
    return config


def stored(cache: LatentCache, sample_id: str, name: str, *, flip: bool = False) -> torch.Tensor:
    part = next(ref for ref in cache.manifest("pairs").rows[sample_id].parts_of(flip=flip) if ref.role == name)
    [tensor] = cache.get(part.key).tensors.values()
    return tensor


def test_a_batch_has_the_parts_of_its_samples(config: Config) -> None:
    with LatentCache(config.cache) as cache:
        for flip in (False, True):
            batch = cache.batch(NAMES[:2], device="cpu", output="moments", flip=flip)
            for number, sample_id in enumerate(NAMES[:2]):
                for name, field in (("control 1", "control_latents_1"), ("control 2", "control_latents_2")):
                    assert torch.equal(batch[field][number], stored(cache, sample_id, name, flip=flip))
                assert torch.equal(batch["mask"][number], stored(cache, sample_id, "mask", flip=flip))
        assert batch["control_latents_1"].shape == batch["control_latents_2"].shape == (2, 4, 8, 8)
        assert batch["mask"].shape == (2, 1, 8, 8) and batch["mask"].dtype == torch.uint8
        assert "latents" not in batch and batch["moments"].shape == (2, 8, 8, 8), "nothing took the image's place"


def test_control_latents_are_scaled_as_latents_are_and_masks_keep_their_numbers(config: Config) -> None:
    with LatentCache(config.cache) as cache:
        plain = cache.batch(NAMES[:2], device="cpu")
        scaled = cache.batch(NAMES[:2], device="cpu", dtype=torch.bfloat16, scaled=True)
        scaling = cache.scaling(cache.manifest("pairs"))
        expected = scaling.apply(plain["control_latents_1"].float()).to(torch.bfloat16)
        assert torch.equal(scaled["control_latents_1"], expected)
        assert torch.equal(scaled["mask"], plain["mask"]) and scaled["mask"].dtype == torch.uint8


def test_control_images_of_other_shapes_are_in_other_batches(config: Config) -> None:
    dataset = LatentDataset(config.cache, "pairs", flips=True)
    assert {dataset.bucket(index) for index in range(len(dataset))} == {(64, 64)}
    sampler = BucketBatchSampler(dataset, 8, shuffle=False)
    batches = list(sampler)
    assert sorted(map(len, batches)) == [4, 4]
    shapes = {default_collate(dataset.__getitems__(batch))["control_latents_2"].shape[2:] for batch in batches}
    assert shapes == {(8, 8), (4, 12)}
    assert [dataset[index]["sample_id"] for index in range(len(dataset))] == NAMES * 2
    with pytest.raises(StoreError, match="control_latents_2"):
        dataset.__getitems__(list(range(len(dataset))))
    with pytest.raises(StoreError, match="control_latents_2"):
        dataset.cache.batch(NAMES, device="cpu")


def test_companions_of_equal_sizes_and_other_roles_are_in_other_batches(config: Config, tmp_path: Path) -> None:
    """Of joined datasets: a mask is no control image, and a mirrored twin no second one."""
    with LatentCache(shutil.copytree(location_of(config.cache), tmp_path / "own")) as cache:
        whole = cache.manifest("pairs")
        kept = {  # of each: first control and its twin, second control and its twin, mask and its twin
            "twins": lambda parts: parts[:2],
            "two": lambda parts: (parts[0], parts[0]),
            "masked": lambda parts: (parts[0], parts[4]),
            "mask": lambda parts: (parts[4], parts[5]),
        }
        for name, chosen in kept.items():
            rows = {sample_id: replace(row, parts=chosen(row.parts)) for sample_id, row in whole.rows.items()}
            cache.manifests.write(replace(whole, name=name, rows=RowTable.of(rows)))
        dataset = LatentDataset(tmp_path / "own", [*kept])
        batches = list(LatentLoader(BucketBatchSampler(dataset, 3, seed=1), device="cpu"))
    assert sorted(name for batch in batches for name in batch["dataset"]) == sorted([*kept] * len(NAMES))
    assert all(len({*batch["dataset"]}) == 1 for batch in batches)


def test_a_lost_part_is_an_error_of_its_sample(config: Config, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(config.cache.path, tmp_path / "cache")
    with LatentCache(tmp_path / "cache") as cache:
        part = next(ref for ref in cache.manifest("pairs").rows["0.png"].parts_of() if ref.role == "mask")
        assert cache.store.remove([part.key]) == 1
        with pytest.raises(SampleError, match=r"0\.png.*has no entry"):
            cache.batch(["0.png"], device="cpu")
        batch: dict[str, Any] = cache.batch(["1.png"], device="cpu")
        assert "mask" in batch
