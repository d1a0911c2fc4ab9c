"""Whole batches as items: those of the loader, whatever asks for them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from helpers.ragged_samples import on_disk
from loading import lose_image, make_cache, plain
from torch.utils.data import DataLoader

from latentcache import BucketBatchSampler, CachedBatches, LatentCache, LatentDataset, LatentLoader, unpadded
from latentcache.errors import SampleError, StoreError


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cache(tmp_path_factory.mktemp("batches"))


def sampler_of(path: Path, rank: int = 0, world_size: int = 1) -> BucketBatchSampler:
    dataset = LatentDataset(path, flips=True, caption="random")
    return BucketBatchSampler(dataset, 3, seed=5, rank=rank, world_size=world_size)


@pytest.mark.parametrize(("output", "scaled"), [("latents", True), ("mean", False), ("moments", False)])
def test_item_n_is_the_nth_batch_of_the_loader_in_each_epoch(path: Path, output: str, scaled: bool) -> None:
    options = {"output": output, "scaled": scaled, "dtype": torch.float32}
    for rank in range(2):
        batches = CachedBatches(sampler_of(path, rank, 2), **options)
        loader = LatentLoader(sampler_of(path, rank, 2), device="cpu", prefetch=0, **options)
        for epoch in (0, 2, 1):
            loader.set_epoch(epoch)
            batches.set_epoch(epoch)
            expected = [plain(batch) for batch in loader]
            assert len(batches) == len(expected) == 3
            numbers = [2, 0, 1, -1, 2]
            assert [plain(batches[number]) for number in numbers] == [expected[number] for number in numbers]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_shuffling_data_loader_with_workers_gives_each_batch_once(path: Path, method: str) -> None:
    batches = CachedBatches(sampler_of(path), scaled=True)
    batches.set_epoch(1)
    expected = [plain(batches[number]) for number in range(len(batches))]
    made = DataLoader(
        batches, batch_size=1, shuffle=True, num_workers=2, collate_fn=_first, multiprocessing_context=method
    )
    got = [plain(batch) for batch in made]
    assert sorted(map(repr, got)) == sorted(map(repr, expected))
    assert plain(pickle.loads(pickle.dumps(batches))[0]) == expected[0]


def test_the_epoch_is_the_one_that_was_set_also_where_the_sampler_was_there_before(path: Path) -> None:
    sampler = sampler_of(path)
    batches = CachedBatches(sampler)
    sampler.set_epoch(1)
    batches.set_epoch(1)
    loader = LatentLoader(sampler, device="cpu", prefetch=0)
    assert [plain(batches[number]) for number in range(len(batches))] == [plain(batch) for batch in loader]


def test_workers_that_live_for_several_epochs_follow_the_epoch(path: Path) -> None:
    batches = CachedBatches(sampler_of(path))
    made = DataLoader(batches, batch_size=1, num_workers=1, persistent_workers=True, collate_fn=_first)
    for epoch in (0, 1, 2):
        batches.set_epoch(epoch)
        loader = LatentLoader(sampler_of(path), device="cpu", prefetch=0)
        loader.set_epoch(epoch)
        assert [plain(batch) for batch in made] == [plain(batch) for batch in loader]


def test_an_option_that_is_spelled_wrongly_is_refused(path: Path) -> None:
    with pytest.raises(TypeError, match="has no option 'caption_dropuot'; did you mean 'caption_dropout'"):
        LatentDataset(path, caption_dropuot=0.1)
    with pytest.raises(TypeError, match=r"LatentCache has no option 'colour'; there are .*retry_s"):
        LatentCache(path, colour=1)


def _first(batches: list[dict[str, object]]) -> dict[str, object]:
    return batches[0]


def test_a_lost_sample_is_named_and_bad_input_is_refused(tmp_path: Path) -> None:
    dataset = LatentDataset(make_cache(tmp_path))
    batches = CachedBatches(BucketBatchSampler(dataset, 5, shuffle=False))
    lose_image(dataset, "a.png")
    with pytest.raises(SampleError, match=r"a\.png"):
        [batches[number] for number in range(len(batches))]
    with pytest.raises(IndexError):
        batches[len(batches)]
    with pytest.raises(StoreError, match="one of latents, mean, moments"):
        CachedBatches(batches.sampler, output="pixels")  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="leave out scaled=True"):
        CachedBatches(batches.sampler, output="moments", scaled=True)


def test_texts_come_without_padding(tmp_path: Path, path: Path) -> None:
    lengths = [4, 2, 3, 7]
    dataset = LatentDataset(on_disk(tmp_path / "cache", "qwen-image", lengths))
    found = {}
    for batch in map(CachedBatches(BucketBatchSampler(dataset, 3)).__getitem__, range(2)):
        texts = unpadded(batch, "prompt_embeds")
        found.update(zip(batch["sample_id"], map(len, texts), strict=True))
        for text, padded in zip(texts, batch["prompt_embeds"], strict=True):
            assert torch.equal(text, padded[: len(text)])
    assert found == dict(zip("0123", lengths, strict=True))
    batch = CachedBatches(sampler_of(path))[0]
    assert all(map(torch.equal, unpadded(batch, "prompt_embeds"), batch["prompt_embeds"]))
