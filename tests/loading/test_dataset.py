"""A torch Dataset of items. With workers it is in test_choices and test_cached_batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.photo_files import write_photo
from helpers.remote_samples import COMMON, make_cache
from torch.utils.data import DataLoader

from latentcache import LatentCache, LatentDataset, LatentLoader
from latentcache.config import Config
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Row
from latentcache.errors import SampleError, StoreError
from latentcache.loading.dataset import Order
from latentcache.loading.sampler import BucketBatchSampler, Visit
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_parts
from latentcache.precache.explanation import explain
from latentcache.precache.run import run_precache
from latentcache.types import Refusal, Size


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Config:
    config = make_config(**{"datasets.0.flip": True, "datasets.0.repeats": 2})
    run_precache(config)
    return config


def test_a_data_loader_gives_what_the_cache_gives(config: Config) -> None:
    dataset = LatentDataset(config.cache.path)
    assert len(dataset) == 10
    item = dataset[0]
    assert item["moments"].shape == (8, 8, 16) and item["prompt_embeds"].shape == (77, 72)
    assert item["target_size"].tolist() == [64, 128] and item["target_size"].dtype == torch.int64
    sampler = BucketBatchSampler(dataset, 2, seed=1)
    loader = DataLoader(dataset, batch_sampler=sampler)
    seen = []
    with LatentCache(config.cache.path) as cache:
        for batch in loader:
            placed = dataset.place(batch, device="cpu", scaled=True, generator=torch.Generator().manual_seed(0))
            direct = cache.batch(
                batch["sample_id"], device="cpu", scaled=True, generator=torch.Generator().manual_seed(0)
            )
            for name in ("latents", "prompt_embeds", "pooled_prompt_embeds", "add_time_ids"):
                assert torch.equal(placed[name], direct[name]), name
            assert placed["caption"] == direct["caption"]
            assert placed["original_size"].tolist() == [list(size) for size in direct["original_size"]]
            seen += batch["sample_id"]
    assert sorted(seen) == sorted(["a.png", "b.png", "c.png", "d.png", "sub/e.png"] * 2)


def test_joined_manifests_keep_to_their_own_images(make_config: Callable[..., Config], photos: Path) -> None:
    config = make_config(**{"datasets.0.flip": True, "datasets.0.repeats": 2})
    run_precache(config)
    write_photo(photos / "0.png", 9, (80, 144))  # the other manifest has another first sample
    run_precache(make_config(**{"datasets.0.flip": True, "datasets.0.name": "other"}))
    names, path = ["photos", "other", "photos"], config.cache.path
    for flips in (True, False, ["other"], ["photos"], "photos"):
        mirrored = set(names) if flips is True else {flips} if isinstance(flips, str) else set(flips or ())
        parts = [LatentDataset(path, name, flips=name in mirrored) for name in names]
        alone = [part[index] for part in parts for index in range(len(part))]
        joined = LatentDataset(path, names, flips=flips)
        assert joined[-1]["sample_id"] == alone[-1]["sample_id"] and joined.bucket(-1) == parts[-1].bucket(-1)
        for beyond in (len(alone), -len(alone) - 1):
            with pytest.raises(IndexError, match=f"of {len(alone)}"):
                joined.bucket(beyond)
        assert len(joined) == len(alone)
        for _ in range(2):
            for index, expected in enumerate(alone):
                found = joined[index]
                assert found["sample_id"] == expected["sample_id"], index
                assert torch.equal(found["moments"], expected["moments"]), index


def test_the_resolutions_of_one_dataset_are_read_together(make_config: Callable[..., Config]) -> None:
    config = make_config(**{"datasets.0.resolutions": [64, 96], "datasets.0.buckets": {"step": 32}})
    report = run_precache(config)
    assert report.num_samples == 10 and report.num_encoded == 10 + 7, "captions are encoded once"
    names = [each.name for each in config.datasets]
    assert names == ["photos-64", "photos-96"]
    dataset = LatentDataset(config.cache, names)
    assert len(dataset) == 10 and {dataset.bucket(item) for item in range(5)} == {Size(64, 64)}
    assert {dataset.bucket(item) for item in range(5, 10)} == {Size(64, 128), Size(128, 64)}
    with LatentCache(config.cache, manifest="photos-64") as cache:
        assert cache.batch(["a.png"], device="cpu")["target_size"] == [(64, 64)]
    found = explain(config, "a.png", models=LoadedModels(**tiny_parts()))
    assert [each["dataset"] for each in found.datasets] == names


def test_a_plain_shuffled_dataloader_is_told_what_to_use(config: Config) -> None:
    """torch itself says that it cannot stack tensors of unequal sizes."""
    path = config.cache.path
    for dataset in (LatentDataset(path), LatentDataset(path, ["photos"])):
        with pytest.raises(StoreError, match=r"lie in .*, .*: batch them with latentcache.BucketBatchSampler"):
            list(DataLoader(dataset, batch_size=10, shuffle=True))


def test_what_a_dataset_cannot_give_is_refused_when_it_is_made(make_config: Callable[..., Config]) -> None:
    config = make_config()
    run_precache(config)
    for caption in ("rnd", -1, 0.5, None):
        with pytest.raises(StoreError, match=rf"caption is {caption!r}; it must be a number from 0 on, or 'random'"):
            LatentDataset(config.cache.path, caption=caption)  # type: ignore[arg-type]  # the error is the point
    with pytest.raises(SampleError, match="has no flipped entry"):
        LatentDataset(config.cache.path, flips=True)
    with pytest.raises(StoreError, match="flips names photo; the manifests are photos"):
        LatentDataset(config.cache.path, "photos", flips="photo")
    for names in ([], None):
        run_precache(make_config(**{"datasets.0.name": "other"}))
        with pytest.raises(StoreError, match="name the manifest; there are: other, photos"):
            LatentDataset(config.cache.path, names)


@pytest.mark.parametrize("order", ["random", "packs"])
def test_a_manifest_in_which_all_is_refused_has_no_items(tmp_path: Path, order: Order) -> None:
    path = make_cache(tmp_path / "cache")
    refusal = Refusal("x.png", "x.png", "truncated", "ends too early")
    rows = {"x.png": Row("x.png", "x.png", None, (), (), refusal)}
    ManifestFolder(path / "manifests").write(Manifest("refused", "train", 3, COMMON, rows))
    for names, num_items in ((["refused"], 0), (["served", "refused"], 48), (["refused", "served"], 48)):
        dataset = LatentDataset(path, names, order=order)
        with LatentLoader(BucketBatchSampler(dataset, 4), device="cpu") as loader:
            assert sum(len(batch["sample_id"]) for batch in loader) == len(dataset) == num_items
            loader.load_state_dict(loader.state_dict())
            if not num_items:
                with pytest.raises(StoreError, match="no batch"):
                    loader.forever()


def test_a_sample_without_captions_is_named_when_one_is_drawn(config: Config) -> None:
    with LatentCache(config.cache.path) as cache:
        [manifest] = cache.datasets()
        rows = dict(manifest.rows) | {"b.png": replace(manifest.rows["b.png"], captions=())}
        cache.manifests.write(manifest.with_rows(rows))
    dataset = LatentDataset(config.cache.path, caption="random")
    assert dataset[0]["sample_id"] == "a.png"
    for number in (1, Visit.of(1, 7)):
        with pytest.raises(SampleError, match=r"'b\.png': has 0 captions, but number 0 was requested"):
            dataset[number]


def test_texts_of_other_encoders_are_not_mixed(make_config: Callable[..., Config], config: Config) -> None:
    run_precache(make_config(**{"datasets.0.name": "skipped", "encode.clip_skip": 1}))
    run_precache(make_config(**{"datasets.0.name": "halves", "encode.text_store_dtype": "float16"}))
    with pytest.raises(StoreError, match="texts of photos, skipped were encoded by other text encoders, or otherwise"):
        LatentDataset(config.cache.path, ["photos", "skipped"])
    assert len(LatentDataset(config.cache.path, ["skipped"])) == 5
    assert len(LatentDataset(config.cache.path, ["photos", "halves"])) == 15, "the dtype alone is no other text"
