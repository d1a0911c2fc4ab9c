"""A torch Dataset of items, in any order. test_choices.py has workers and samples with companions."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.remote_samples import COMMON, make_cache, make_manifest

from latentcache import BucketBatchSampler, DiskStore, LatentCache, LatentDataset, LatentLoader
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Row
from latentcache.errors import SampleError, StoreError
from latentcache.identity import key_of
from latentcache.loading.dataset import Order
from latentcache.loading.sampler import Places, Visit
from latentcache.store import MemoryStore
from latentcache.store.upkeep import compact
from latentcache.types import Entry, Record, Refusal


def test_joined_manifests_keep_to_their_own_images(path: Path) -> None:
    with LatentCache(path) as cache:
        manifest = cache.manifest("photos")
        rows = {name: row for name, row in manifest.rows.items() if name != "a.png"}
        cache.manifests.write(replace(manifest.with_rows(rows), name="other"))
    names = ["photos", "other", "photos"]
    for flips in (True, False, ["other"], "photos"):
        mirrored = set(names) if flips is True else {flips} if isinstance(flips, str) else set(flips or ())
        parts = [LatentDataset(path, name, flips=name in mirrored) for name in names]
        alone = [part[index] for part in parts for index in range(len(part))]
        joined = LatentDataset(path, names, flips=flips)
        assert len(joined) == len(alone) and joined.bucket(-1) == parts[-1].bucket(-1)
        for beyond in (len(alone), -len(alone) - 1):
            with pytest.raises(IndexError, match=f"of {len(alone)}"):
                joined.bucket(beyond)
        for index, expected in enumerate([*alone, alone[-1]]):
            found = joined[index if index < len(alone) else -1]
            assert found["sample_id"] == expected["sample_id"], index
            assert torch.equal(found["moments"], expected["moments"]), index
    assert found["target_size"].tolist() == [64, 128] and found["target_size"].dtype == torch.int64


NO_SHARES = (-0.1, 1.1, math.nan, "1", None)


@pytest.mark.parametrize(
    ("names", "options", "error", "message"),
    [
        *(("served", {"caption": each}, StoreError, rf"caption is {each!r}; it must be") for each in ("rnd", -1, None)),
        *(("served", {"caption_dropout": each}, StoreError, "it must be a number from 0 to 1") for each in NO_SHARES),
        ("served", {"dropout_to": "zero"}, StoreError, "dropout_to is 'zero'; it must be one of empty, zeros"),
        ("served", {"order": "pack"}, StoreError, "order is 'pack'; it must be one of random, packs"),
        ("served", {"flips": "photo"}, StoreError, "flips names photo; the manifests are served"),
        ("served", {"flips": True}, SampleError, "has no flipped entry"),
        ("served", {"flips": "random"}, SampleError, "has no flipped entry"),
        (None, {}, StoreError, "name the manifest; there are: other, served"),
        ([], {}, StoreError, "name the manifest; there are: other, served"),
        ("served", {"caption_dropuot": 0.1}, TypeError, "no option 'caption_dropuot'; did you mean 'caption_dropout'"),
    ],
)
def test_what_a_dataset_cannot_give_is_refused_when_it_is_made(
    tmp_path: Path, names: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = make_cache(tmp_path)
    ManifestFolder(path / "manifests").write(make_manifest("other"))
    with pytest.raises(error, match=message):
        LatentDataset(path, names, **options)


@pytest.mark.parametrize("order", ["random", "packs"])
def test_a_manifest_in_which_all_is_refused_has_no_items(tmp_path: Path, order: Order) -> None:
    path = make_cache(tmp_path)
    refusal = Refusal("x.png", "x.png", "truncated", "ends too early")
    rows = {"x.png": Row("x.png", "x.png", None, (), (), refusal)}
    ManifestFolder(path / "manifests").write(Manifest("refused", "train", 3, COMMON, rows))
    for names, num_items in ((["refused"], 0), (["served", "refused"], 48), (["refused", "served"], 48)):
        dataset = LatentDataset(path, names, order=order)
        with LatentLoader(BucketBatchSampler(dataset, 4), device="cpu") as loader:
            assert sum(len(batch["sample_id"]) for batch in loader) == len(dataset) == num_items


def test_a_sample_without_captions_is_named_when_one_is_drawn(path: Path) -> None:
    with LatentCache(path) as cache:
        manifest = cache.manifest("photos")
        rows = dict(manifest.rows) | {"b.png": replace(manifest.rows["b.png"], captions=())}
        cache.manifests.write(manifest.with_rows(rows))
    dataset = LatentDataset(path, caption="random")
    assert dataset[0]["sample_id"] == "a.png"
    for number in (1, Visit.of(1, 7)):
        with pytest.raises(SampleError, match=r"'b\.png': has 0 captions, but number 0 was requested"):
            dataset[number]


# The order of packs --------------------------------------------------------------------------------------------------


def in_packs(path: Path) -> BucketBatchSampler:
    return BucketBatchSampler(LatentDataset(path, order="packs"), 4, seed=2, window=2)


def test_a_store_without_packs_is_refused() -> None:
    with pytest.raises(StoreError, match=r"MemoryStore has no packs .* order='random'"):
        Places.of(MemoryStore(), [])


def test_a_resume_goes_on_after_other_entries_came_and_is_refused_after_the_packs_changed(tmp_path: Path) -> None:
    path = make_cache(tmp_path)
    first = in_packs(path)
    whole = [list(batch) for batch in first]
    assert sorted(item for batch in whole for item in batch) == list(range(48))
    for _ in zip(range(5), first, strict=False):
        state = first.state_dict()
    with DiskStore(path) as store:
        for number in range(8):  # ids are random, so some sort between the existing ones
            identity = {"other": number}
            store.add([Entry(Record(key_of(identity), "image", identity, {}), {"moments": torch.zeros(8, 8, 16)})])
        again = in_packs(path)
        again.load_state_dict(state)
        assert [list(batch) for batch in again] == whole[5:]
        dataset = LatentDataset(path, order="packs")
        images = [dataset.cache.row(f"{number}.png")[1].images[0].key for number in range(48)]
        assert dataset.places().rows.tolist() == [place.row for place in store.look_up(images) if place is not None]
        store.remove([LatentDataset(path).cache.row("0.png")[1].images[0].key])
        running = in_packs(path)
        order = [list(batch) for batch in running]
        compact(store)
    with pytest.raises(StoreError, match=r"packs \('[0-9a-f]{64}' there, '[0-9a-f]{64}' here\).*set_epoch\(0\)"):
        in_packs(path).load_state_dict(state)
    assert sorted(item for batch in order for item in batch) == list(range(48)), "a loss is met when it is read"
    with LatentLoader(running, device="cpu", damaged="skip") as loader:
        found = {name for batch in loader for name in batch["sample_id"]}
    assert found == {f"{number}.png" for number in range(1, 48)} and loader.skipped.keys() == {"0.png"}
