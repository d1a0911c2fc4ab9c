"""Texts of natural length: every way to read pads them by the family's rule, and says which rows are theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    image_of,
    in_memory,
    on_disk,
    padded,
    text_of,
)
from torch.utils.data import DataLoader

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import StoreError
from latentcache.families import FamilyName
from latentcache.store import DiskStore

LENGTHS = (3, 9, 2, 7, 1, 5, 4, 8, 6)
SQUARE = ["0", "1", "3", "4", "6", "7"]
"""The samples of the first bucket."""
PADDED_TO: dict[FamilyName, int | None] = {"z-image": None, "chroma": MAX_LENGTH, "wan": 512}
RAGGED = pytest.mark.parametrize("family", PADDED_TO)


def expected(family: FamilyName, names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = [int(name) for name in names]
    return padded(numbers, [LENGTHS[number] for number in numbers], PADDED_TO[family])


def check(batch: dict[str, Any], family: FamilyName) -> None:
    embeds, mask = expected(family, batch["sample_id"])
    assert torch.equal(batch["prompt_embeds"], embeds)
    assert batch["prompt_embeds_mask"].dtype == torch.bool and torch.equal(batch["prompt_embeds_mask"], mask)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[FamilyName], Path]:
    """A cache on disk of each family, made once."""
    folder = tmp_path_factory.mktemp("ragged")

    def path_of(family: FamilyName) -> Path:
        path = folder / family
        return path if path.exists() else on_disk(path, family, LENGTHS)

    return path_of


@pytest.fixture
def open_cache(paths: Callable[[FamilyName], Path]) -> Iterator[Callable[[FamilyName], LatentCache]]:
    opened: list[LatentCache] = []

    def opening(family: FamilyName) -> LatentCache:
        opened.append(LatentCache(paths(family)))
        return opened[-1]

    yield opening
    for cache in opened:
        cache.close()


@RAGGED
def test_a_batch_is_padded_and_has_a_mask(open_cache: Callable[..., LatentCache], family: FamilyName) -> None:
    cache = open_cache(family)
    for names in (SQUARE, ["7", "0"], ["4"], ["4", "4"]):
        for _ in range(2):
            batch = cache.batch(names, device="cpu")
            check(batch, family)
            assert "add_time_ids" not in batch and "pooled_prompt_embeds" not in batch
            assert batch["caption"] == [f"photo {name}" for name in names] and batch["target_size"][0] == (64, 64)


@RAGGED
def test_a_batch_follows_the_requesting_module(open_cache: Callable[..., LatentCache], family: FamilyName) -> None:
    batch = open_cache(family).batch(SQUARE, device=torch.nn.Linear(1, 1).half(), scaled=True)
    embeds, mask = expected(family, SQUARE)
    assert torch.equal(batch["prompt_embeds"], embeds.half()) and torch.equal(batch["prompt_embeds_mask"], mask)
    moments = torch.stack([image_of(family, int(name))["moments"] for name in SQUARE])
    scaling = VIDEO if family == "wan" else IMAGE
    mean = DiagonalGaussianDistribution(moments).mode()
    assert torch.equal(batch["latents"], scaling.apply(mean).half())
    assert batch["latents"].ndim == (5 if family == "wan" else 4)


@RAGGED
def test_items_have_their_own_length_and_collate_pads_them(
    paths: Callable[[FamilyName], Path], family: FamilyName
) -> None:
    dataset = LatentDataset(paths(family))
    for number in (8, 0, 2, 1):
        item = dataset[number]
        assert torch.equal(item["prompt_embeds"], text_of(number, LENGTHS[number]))
        assert "prompt_embeds_mask" not in item and item["sample_id"] == str(number)
    sampler = BucketBatchSampler(dataset, 4, seed=1)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate)
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


@pytest.mark.parametrize(("family", "order"), [("z-image", "random"), ("chroma", "random"), ("wan", "packs")])
def test_the_loader_gives_what_the_cache_gives(
    paths: Callable[[FamilyName], Path], family: FamilyName, order: Any
) -> None:
    dataset = LatentDataset(paths(family), order=order)
    sampler = BucketBatchSampler(dataset, 3, seed=5)
    with LatentLoader(sampler, device="cpu", output="mean", scaled=True) as loader:
        held = [(batch, batch["prompt_embeds"].clone()) for _ in range(2) for batch in loader]
        assert len(held) == 6 or order == "packs"
        for batch, embeds in held:
            check(batch, family)
            direct = dataset.cache.batch(batch["sample_id"], device="cpu", scaled=True)
            assert batch.keys() == direct.keys() and torch.equal(batch["latents"], direct["latents"])
            assert torch.equal(batch["prompt_embeds"], embeds), "a batch that is held is not overwritten"


def test_what_a_family_is_trained_with_decides_whether_latents_are_drawn(
    paths: Callable[[FamilyName], Path],
) -> None:
    for family, draws in (("wan", False), ("z-image", True)):
        dataset = LatentDataset(paths(family))
        with LatentLoader(BucketBatchSampler(dataset, 3, seed=5), device="cpu") as loader:
            for batch in loader:
                mean = dataset.cache.batch(batch["sample_id"], device="cpu")["latents"]
                assert torch.equal(batch["latents"], mean) is not draws
    cache = LatentDataset(paths("wan")).cache
    drawn = cache.batch(["0", "1"], device="cpu", generator=torch.Generator().manual_seed(3))["latents"]
    posterior = DiagonalGaussianDistribution(cache.batch(["0", "1"], device="cpu", output="moments")["moments"])
    assert drawn.ndim == 5 and torch.equal(drawn, posterior.sample(torch.Generator().manual_seed(3)))


def test_a_batch_norm_changes_the_shape(tmp_path: Path) -> None:
    path = on_disk(tmp_path / "cache", "flux", [4] * 3)
    folder = ManifestFolder(path / "manifests")
    manifest = folder.read("ragged")
    assert manifest is not None
    numbers = [0.1 * number for number in range(1, 4 * 4 + 1)]
    scaling = {"scaling_factor": 1.0, "rule": "batch_norm", "mean": numbers, "std": numbers}
    folder.write(Manifest("ragged", "train", 1, {**manifest.common, "scaling": scaling}, manifest.rows))
    with LatentCache(path) as cache:
        names = ["0", "1"]
        plain, scaled = (cache.batch(names, device="cpu", scaled=flag)["latents"] for flag in (False, True))
        assert plain.shape == (2, 4, 8, 8) and scaled.shape == (2, 16, 4, 4)
        scaling = cache.scaling(cache.manifest("ragged"))
        assert torch.equal(scaled, scaling.apply(plain))
    with torch.inference_mode():
        scaling.apply(plain.double())
    live = plain.double().requires_grad_(True)
    scaling.apply(live).square().sum().backward()
    assert live.grad is not None, "statistics that are kept from an inference serve training too"


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


# Several families in one cache ----------------------------------------------------------------------------------------


@pytest.fixture
def mixed() -> Iterator[LatentCache]:
    """Datasets of several families and recipes in one cache: 0-2 z-image, 10-12 wan, 20-22 sdxl, 30-32 and 40-42."""
    store, manifests = in_memory("z-image", LENGTHS[:3], name="z")
    fill(store, manifests, "wan", LENGTHS[:3], name="w", first=12)
    fill(store, manifests, "sdxl", [7] * 3, name="s", first=21)
    fill(store, manifests, "chroma", LENGTHS[:3], name="short", first=30)
    fill(store, manifests, "chroma", LENGTHS[:3], name="long", first=42, max_length=MAX_LENGTH + 1)
    with LatentCache(store=store, manifests=manifests) as cache:
        yield cache


def test_a_batch_that_mixes_families_or_recipes_is_refused(mixed: LatentCache) -> None:
    for names, families in ((["0", "12"], "wan, z-image"), (["21", "0"], "sdxl, z-image")):
        with pytest.raises(StoreError, match=rf"'{names[0]}' and '{names[1]}' were cached for .* {families}"):
            mixed.batch(names, device="cpu")
    with pytest.raises(StoreError, match=r"texts of samples '30' and '42' are padded differently.*max_length"):
        mixed.batch(["30", "42"], device="cpu")


def test_datasets_of_several_families_or_recipes_are_refused(tmp_path: Path) -> None:
    path = on_disk(tmp_path / "cache", "chroma", LENGTHS[:3])
    with DiskStore(path) as store:
        manifests = ManifestFolder(path / "manifests")
        fill(store, manifests, "z-image", LENGTHS[:3], name="other", first=12)
        fill(store, manifests, "chroma", LENGTHS[:3], name="long", first=21, max_length=MAX_LENGTH + 1)
    with pytest.raises(
        StoreError, match="ragged, other were cached for the families chroma, z-image: train them apart"
    ):
        LatentDataset(path, ["ragged", "other"])
    with pytest.raises(StoreError, match="texts of ragged, long are padded differently"):
        LatentDataset(path, ["ragged", "long"])
    both = LatentDataset(path, ["ragged", "ragged"])
    assert both.collate(both.__getitems__([0, 4]))["prompt_embeds_mask"].sum().item() == LENGTHS[0] + LENGTHS[1]


def test_a_manifest_of_another_family_or_recipe_is_refused_by_name() -> None:
    no_recipe = {"text_encoding": {"keeps_padding": False, "max_length": "long"}}
    for change, match in (
        (
            {"family": "sdxl9"},
            "manifest ragged: .*there is no model family 'sdxl9'.*Update latentcache",
        ),
        (no_recipe, "ragged: its text_encoding is no recipe of chroma"),
    ):
        store, manifests = in_memory("chroma", LENGTHS)
        manifest = manifests.read("ragged")
        assert manifest is not None
        manifests.write(Manifest("ragged", "train", 1, {**manifest.common, **change}, manifest.rows))
        with LatentCache(store=store, manifests=manifests) as cache, pytest.raises(StoreError, match=match):
            cache.batch(["0"], device="cpu")


# Prompts --------------------------------------------------------------------------------------------------------------


@RAGGED
def test_a_prompt_is_padded_by_the_same_rule(open_cache: Callable[..., LatentCache], family: FamilyName) -> None:
    cache, length = open_cache(family), PADDED_TO[family]
    for negative, rows in ((False, 5), (True, NEGATIVE_ROWS)):
        found = cache.prompt("a cat", device=torch.nn.Linear(1, 1).half(), negative=negative)
        embeds, mask = padded([900 + negative], [rows], length)
        assert found.keys() == {"prompt_embeds", "prompt_embeds_mask"}
        assert torch.equal(found["prompt_embeds"], embeds.half()) and torch.equal(found["prompt_embeds_mask"], mask)
    assert cache.text_shapes() == {"prompt_embeds": (LENGTHS[0], 6)}
    entry = cache.get(cache.row("1")[1].captions[0].key)
    assert entry.ragged == {"prompt_embeds"} and torch.equal(entry.tensors["prompt_embeds"], text_of(1, LENGTHS[1]))
