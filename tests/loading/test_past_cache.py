"""Batches of a cache that is read past the page cache are those of any other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from helpers.pack_damage import damage
from loading import by_hand, lose_image, make_cache, plain
from torch.utils.data import DataLoader

from latentcache import LatentCache, LatentDataset
from latentcache.errors import SampleError
from latentcache.loading.loader import LatentLoader
from latentcache.loading.sampler import BucketBatchSampler
from latentcache.store.aio import ReadQueue
from latentcache.store.mapped import MAX_IDLE_READS

pytestmark = pytest.mark.usefixtures("past_cache")
WIDE = ["a.png", "b.png", "sub/e.png"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cache(tmp_path_factory.mktemp("past_cache"))


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "cache")


@pytest.fixture
def num_begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many fields each call began to read."""
    counts, real = [], ReadQueue.submit

    def submit(self: ReadQueue, pieces: list) -> None:
        counts.append(len(pieces))
        real(self, pieces)

    monkeypatch.setattr(ReadQueue, "submit", submit)
    return counts


def test_batches_are_equal_and_read_anew(path: Path, num_begun: list[int]) -> None:
    with LatentCache(path, io="mapped") as mapped, LatentCache(path, io="direct") as cache:
        cache.prompt("", device="cpu")  # the first read of all looks whether it can be done
        for _ in range(MAX_IDLE_READS):
            for options in ({}, {"flip": True}, {"output": "moments", "dtype": torch.bfloat16}):
                expected = plain(mapped.batch(WIDE, device="cpu", **options))
                num_begun.clear()
                assert plain(cache.batch(WIDE, device="cpu", **options)) == expected
                assert sum(num_begun) == 3 * len(WIDE)
        batch = cache.batch(WIDE, device="cpu", output="moments")
        given = {name: torch.zeros_like(value) for name, value in batch.items() if isinstance(value, torch.Tensor)}
        again = cache.batch(WIDE, device="cpu", output="moments", out=given)
        assert plain(again) == plain(batch) and again["moments"] is given["moments"]
        assert cache.prompt("", device="cpu")["prompt_embeds"].equal(mapped.prompt("", device="cpu")["prompt_embeds"])


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("where", [None, "cpu"])
def test_the_loader_gives_the_same_and_reads_each_field_once(
    path: Path, num_begun: list[int], prefetch: int, where: str | None
) -> None:
    expected = by_hand(BucketBatchSampler(LatentDataset(path, flips=True, caption="random"), 3, seed=5))
    dataset = LatentDataset(path, flips=True, caption="random", io="direct")
    sampler = BucketBatchSampler(dataset, 3, seed=5)
    with LatentLoader(sampler, device="cpu", scaled=True, prefetch=prefetch, resident=where) as loader:
        assert [plain(batch) for batch in loader] == expected
    # One more: the first read, of one block, shows that it can be done. A batch's texts may repeat.
    assert 2 * len(dataset) < sum(num_begun) <= 3 * len(dataset) + 1 or where is not None


def test_workers_read_for_themselves(path: Path) -> None:
    dataset = LatentDataset(path, io="direct")
    mapped = LatentDataset(path)
    expected = [mapped[number] for number in range(len(mapped))]
    dataset.cache.batch(WIDE, device="cpu")  # a fork has the parent's
    found = list(DataLoader(dataset, batch_size=None, num_workers=2))
    assert len(found) == len(expected) and list(map(plain, found)) == list(map(plain, expected))


def test_a_lost_and_a_damaged_sample_are_named(path: Path) -> None:
    dataset = LatentDataset(path, io="direct")
    lose_image(dataset, "a.png")
    entry = LatentCache(path).get(dataset.cache.row("b.png")[1].images[0].key)
    damage(path, entry.tensors["moments"].numpy().tobytes())
    for sample_id in ("a.png", "b.png"):
        with pytest.raises(SampleError, match=rf"{sample_id}.*(no entry|damaged)"):
            dataset.cache.batch(["sub/e.png", sample_id], device="cpu")
    loader = LatentLoader(BucketBatchSampler(dataset, 2), device="cpu", damaged="skip")
    assert {name for batch in loader for name in batch["sample_id"]} == {"c.png", "d.png", "sub/e.png"}
    assert loader.skipped.keys() == {"a.png", "b.png"}
