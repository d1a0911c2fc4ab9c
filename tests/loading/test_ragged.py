"""Texts of natural length: every way to read pads them by the family's rule, and masks the padding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from helpers.ragged_samples import (
    IMAGE,
    MAX_LENGTH,
    NEGATIVE_ROWS,
    VIDEO,
    fill,
    moments_of,
    on_disk,
    padded,
    text_of,
)
from torch.utils.data import DataLoader

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader, unpadded
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import StoreError
from latentcache.families import FamilyName
from latentcache.store import DiskStore

LENGTHS = (3, 9, 2, 7, 1, 5, 4, 8, 6)
SQUARE = ["0", "1", "3", "4", "6", "7"]
"""The samples of the first bucket."""
PADDED_TO: dict[FamilyName, int | None] = {"z-image": None, "chroma": MAX_LENGTH, "wan": 512}


@pytest.fixture(scope="module", params=PADDED_TO)
def family(request: pytest.FixtureRequest) -> FamilyName:
    family: FamilyName = request.param
    return family


@pytest.fixture(scope="module")
def path(family: FamilyName, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return on_disk(tmp_path_factory.mktemp("ragged") / "cache", family, LENGTHS)


def check(batch: dict[str, Any], family: FamilyName) -> None:
    numbers = [int(name) for name in batch["sample_id"]]
    embeds, mask = padded(numbers, [LENGTHS[number] for number in numbers], PADDED_TO[family])
    assert torch.equal(batch["prompt_embeds"], embeds.to(batch["prompt_embeds"].dtype))
    assert batch["prompt_embeds_mask"].dtype == torch.bool and torch.equal(batch["prompt_embeds_mask"], mask)
    for number, text in zip(numbers, unpadded(batch, "prompt_embeds"), strict=True):
        assert torch.equal(text, text_of(number, LENGTHS[number]).to(text.dtype))


def test_a_batch_is_padded_has_a_mask_and_follows_the_requesting_module(cache: LatentCache, family: FamilyName) -> None:
    for names in (SQUARE, ["7", "0"], ["4"], ["4", "4"]):
        for _ in range(2):
            batch = cache.batch(names, device="cpu")
            check(batch, family)
            assert "add_time_ids" not in batch and "pooled_prompt_embeds" not in batch
            assert batch["caption"] == [f"photo {name}" for name in names] and batch["target_size"][0] == (64, 64)
    batch = cache.batch(SQUARE, device=torch.nn.Linear(1, 1).half(), scaled=True)
    check(batch, family)
    moments = torch.stack([moments_of(family, int(name)) for name in SQUARE])
    mean = DiagonalGaussianDistribution(moments).mode()
    assert torch.equal(batch["latents"], (VIDEO if family == "wan" else IMAGE).apply(mean).half())
    assert batch["latents"].ndim == (5 if family == "wan" else 4) and batch["prompt_embeds"].dtype == torch.float16


def test_items_have_their_own_length_and_collate_pads_them(path: Path, family: FamilyName) -> None:
    dataset = LatentDataset(path)
    for number in (8, 0, 2, 1):
        item = dataset[number]
        assert torch.equal(item["prompt_embeds"], text_of(number, LENGTHS[number]))
        assert "prompt_embeds_mask" not in item and item["sample_id"] == str(number)
    loader = DataLoader(dataset, batch_sampler=BucketBatchSampler(dataset, 4, seed=1), collate_fn=dataset.collate)
    seen: list[str] = []
    for batch in loader:
        check(batch, family)
        placed = dataset.place(batch, device="cpu", dtype=torch.float16, scaled=True)
        direct = dataset.cache.batch(batch["sample_id"], device="cpu", dtype=torch.float16, scaled=True)
        for name in ("latents", "prompt_embeds", "prompt_embeds_mask"):
            assert placed[name].dtype == direct[name].dtype and torch.equal(placed[name], direct[name]), name
        assert placed["target_size"].dtype == torch.int64
        seen += batch["sample_id"]
    assert sorted(seen) == sorted(map(str, range(len(LENGTHS))))


def test_the_loader_gives_what_the_cache_gives_and_draws_where_the_family_does(path: Path, family: FamilyName) -> None:
    dataset = LatentDataset(path, order="packs" if family == "wan" else "random")
    sampler = BucketBatchSampler(dataset, 3, seed=5)
    with LatentLoader(sampler, device="cpu", output="mean", scaled=True) as loader:
        held = [(batch, batch["prompt_embeds"].clone()) for _ in range(2) for batch in loader]
    with LatentLoader(sampler, device="cpu", scaled=True) as loader:
        drawn = [batch["latents"] for batch in loader] * 2
    for (batch, embeds), latents in zip(held, drawn, strict=True):
        check(batch, family)
        direct = dataset.cache.batch(batch["sample_id"], device="cpu", scaled=True)
        assert batch.keys() == direct.keys() and torch.equal(batch["latents"], direct["latents"])
        assert torch.equal(batch["prompt_embeds"], embeds), "a batch that is held is not overwritten"
        assert torch.equal(latents, direct["latents"]) == (family == "wan"), "Wan is trained with means"


def test_a_prompt_is_padded_by_the_same_rule(cache: LatentCache, family: FamilyName) -> None:
    for negative, rows in ((False, 5), (True, NEGATIVE_ROWS)):
        found = cache.prompt("a cat", device=torch.nn.Linear(1, 1).half(), negative=negative)
        embeds, mask = padded([900 + negative], [rows], PADDED_TO[family])
        assert found.keys() == {"prompt_embeds", "prompt_embeds_mask"}
        assert torch.equal(found["prompt_embeds"], embeds.half()) and torch.equal(found["prompt_embeds_mask"], mask)
    assert cache.text_shapes() == {"prompt_embeds": (LENGTHS[0], 6)}
    entry = cache.get(cache.row("1")[1].captions[0].key)
    assert entry.ragged == {"prompt_embeds"} and torch.equal(entry.tensors["prompt_embeds"], text_of(1, LENGTHS[1]))


def test_float8_texts_are_converted_for_a_module_and_given_as_they_are_without_one(tmp_path: Path) -> None:
    path = on_disk(tmp_path / "cache", "flux", [4] * 3, dtype=torch.float8_e4m3fn)
    stored = torch.stack([text_of(number, 4, torch.float8_e4m3fn) for number in (0, 1)])
    dataset = LatentDataset(path)
    for device, dtype in (("cpu", torch.float8_e4m3fn), (torch.nn.Linear(1, 1).bfloat16(), torch.bfloat16)):
        with LatentLoader(BucketBatchSampler(dataset, 2, shuffle=False), device=device, prefetch=0) as loader:
            batch = next(batch for batch in loader if batch["sample_id"] == ["0", "1"])
        for found in (batch, dataset.cache.batch(["0", "1"], device=device)):
            assert found["prompt_embeds"].dtype == dtype
            assert torch.equal(found["prompt_embeds"].float(), stored.float())


def test_families_and_recipes_are_not_mixed(tmp_path: Path) -> None:
    path = on_disk(tmp_path / "cache", "chroma", LENGTHS[:3])
    with DiskStore(path) as store:
        manifests = ManifestFolder(path / "manifests")
        fill(store, manifests, "z-image", LENGTHS[:3], name="other", first=12)
        fill(store, manifests, "chroma", LENGTHS[:3], name="long", first=21, max_length=MAX_LENGTH + 1)
    with pytest.raises(StoreError, match="ragged, other were cached for the families chroma, z-image"):
        LatentDataset(path, ["ragged", "other"])
    with pytest.raises(StoreError, match="texts of ragged, long are padded differently"):
        LatentDataset(path, ["ragged", "long"])
    both = LatentDataset(path, ["ragged", "ragged"])
    assert both.collate(both.__getitems__([0, 4]))["prompt_embeds_mask"].sum().item() == LENGTHS[0] + LENGTHS[1]
    with LatentCache(path) as cache:
        with pytest.raises(StoreError, match=r"'12' and '0' were cached for .* chroma, z-image"):
            cache.batch(["12", "0"], device="cpu")
        with pytest.raises(StoreError, match=r"texts of samples '0' and '21' are padded differently.*max_length"):
            cache.batch(["0", "21"], device="cpu")
        manifest = cache.manifest("ragged")
        for name, change in (("skipped", {"clip_skip": 1}), ("halves", {"store_dtype": "float16"})):
            common = {**manifest.common, "text_encoding": manifest.common["text_encoding"] | change}
            cache.manifests.write(replace(manifest, name=name, common=common))
    with pytest.raises(StoreError, match="texts of ragged, skipped were encoded by other text encoders, or otherwise"):
        LatentDataset(path, ["ragged", "skipped"])
    assert len(LatentDataset(path, ["ragged", "halves"])) == 6, "another dtype alone is no other text"


def test_a_manifest_of_another_family_or_recipe_is_refused_by_name(tmp_path: Path) -> None:
    no_recipe = {"keeps_padding": False, "max_length": "long"}
    with LatentCache(on_disk(tmp_path / "cache", "chroma", LENGTHS)) as cache:
        manifest = cache.manifest("ragged")
        for change, message in (
            ({"family": "sdxl9"}, "manifest ragged: .*there is no model family 'sdxl9'.*Update latentcache"),
            ({"text_encoding": no_recipe}, "ragged: .* is no recipe of chroma"),
        ):
            cache.manifests.write(replace(manifest, common={**manifest.common, **change}))
            cache.refresh()
            with pytest.raises(StoreError, match=message):
                cache.batch(["0"], device="cpu")
