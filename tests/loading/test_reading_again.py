"""Reading again: what happens when the cache changes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import plain

from latentcache import LatentCache, LatentDataset
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.row_table import Ref
from latentcache.errors import SampleError
from latentcache.identity import key_of
from latentcache.loading.loader import LatentLoader
from latentcache.loading.sampler import BucketBatchSampler
from latentcache.store import DiskStore
from latentcache.store.upkeep import compact
from latentcache.types import Entry, Record, Refusal

WIDE = ["a.png", "b.png", "sub/e.png"]


@pytest.fixture
def cache(path: Path) -> Iterator[LatentCache]:
    with LatentCache(path) as cache:
        yield cache


def test_the_callers_default_device_moves_nothing(path: Path) -> None:
    def everything() -> list[Any]:
        with LatentCache(path) as cache:
            entry = cache.get(cache.row("a.png")[1].images[0].key)
            found: list[Any] = [plain(entry.tensors), plain(cache.batch(WIDE, device="cpu", output="moments"))]
        sampler = BucketBatchSampler(LatentDataset(path, flips=True, caption="random"), 2, seed=5)
        with LatentLoader(sampler, device="cpu", prefetch=0) as made:
            found.append([plain(batch) for batch in made])
        items = LatentDataset(path, caption="random").__getitems__([0, 1])
        return found + [item["original_size"].tolist() for item in items]

    expected = everything()
    with torch.device("meta"):  # as torch.set_default_device does it
        assert everything() == expected


def test_a_manifest_that_was_replaced_counts_after_a_refresh(cache: LatentCache) -> None:
    assert cache.batch(WIDE, device="cpu")["caption"] == ["a red house", "a blue car", "a tree"]
    manifest = cache.manifests.read("photos")
    assert manifest is not None
    rows = dict(manifest.rows)
    a, b = rows["a.png"], rows["b.png"]
    rows["a.png"] = replace(a, captions=(Ref.of_text("edited", a.captions[1].key),))
    rows["b.png"] = replace(b, refusal=Refusal("b.png", "b.png", "corrupt", "a test says so"))
    cache.manifests.write(replace(manifest, rows=rows))
    assert cache.batch(WIDE, device="cpu")["caption"] == ["a red house", "a blue car", "a tree"]
    cache.refresh()
    batch = cache.batch(["a.png"], device="cpu")
    assert batch["caption"] == ["edited"]
    assert torch.equal(batch["prompt_embeds"][0], cache.get(a.captions[1].key).tensors["prompt_embeds"])
    with pytest.raises(SampleError, match=r"'b\.png': was refused"):
        cache.batch(WIDE, device="cpu")


def test_what_is_read_during_a_refresh_is_read_again(cache: LatentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread refreshes the cache after this one read a manifest, and before it kept it."""
    read = cache.manifests.read

    def read_slowly(name: str) -> Manifest | None:
        found = read(name)
        assert found is not None
        cache.manifests.write(replace(found, repeats=7))
        thread = threading.Thread(target=cache.refresh)
        thread.start()
        thread.join()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(cache.manifests, "read", read_slowly)
        assert cache.manifest("photos").repeats != 7
    assert cache.manifest("photos").repeats == 7


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
def test_a_closed_cache_releases_what_it_remembered(cache: LatentCache) -> None:
    cache.batch(WIDE, device="cpu")
    assert str(cache.path) in Path("/proc/self/maps").read_text()
    cache.close()
    assert str(cache.path) not in Path("/proc/self/maps").read_text()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
@pytest.mark.parametrize("reader", ["cache", "loader"])
def test_packs_that_were_compacted_away_are_released_with_the_next_batch(path: Path, reader: str) -> None:
    dataset = LatentDataset(path)
    loader = LatentLoader(BucketBatchSampler(dataset, 2, seed=5), device="cpu", prefetch=0)
    store = dataset.cache.store
    assert isinstance(store, DiskStore)
    extra = Record(key_of({"extra": 1}), "text", {"extra": 1}, {})
    store.add([Entry(extra, {"prompt_embeds": torch.ones(1)})])

    def batches() -> list[Any]:
        if reader == "loader":
            return [plain(batch) for batch in loader]
        return [plain(dataset.cache.batch([name], device="cpu")) for name in dataset.cache.sample_ids()]

    expected = batches()
    compact(store)
    loader.set_epoch(0)
    assert batches() == expected
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert not [line for line in lines if str(path) in line and line.endswith("(deleted)")]


def test_a_compaction_in_another_process_never_makes_a_batch_wrong(path: Path) -> None:
    script = (
        "import sys, torch\n"
        "from latentcache.identity import key_of\n"
        "from latentcache.store import DiskStore\n"
        "from latentcache.store.upkeep import compact\n"
        "from latentcache.types import Entry, Record\n"
        "with DiskStore(sys.argv[1]) as store:\n"
        "    store.add([Entry(Record(key_of({'x': 1}), 'text', {'x': 1}, {}), {'prompt_embeds': torch.ones(1)})])\n"
        "    assert compact(store).num_packs_after == 1\n"
    )
    dataset, unread = LatentDataset(path), LatentDataset(path, flips=True)
    with LatentCache(path) as cache:
        expected = [plain(cache.batch([name], device="cpu")) for name in cache.sample_ids()]
        items = [plain(dataset[index]) for index in range(len(dataset))]
        subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=120)
        assert [plain(cache.batch([name], device="cpu")) for name in cache.sample_ids()] == expected
        assert [plain(dataset[index]) for index in range(len(dataset))] == items
        assert [plain(unread[index]) for index in range(len(items) // 2)] == items[: len(items) // 2]
        # What is looked up again is found where it is now.
        list(cache.store.keys())
        assert [plain(cache.batch([name], device="cpu")) for name in cache.sample_ids()] == expected
