"""Pack order from an object store: the batches of the directory, and packs that come whole."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.remote_samples import entries_of, make_cache
from obstore.store import MemoryStore

from latentcache import BucketBatchSampler, DiskStore, LatentDataset, LatentLoader
from latentcache.cli.app import main
from latentcache.errors import StoreError
from latentcache.loading.pack_order import Places
from latentcache.remote import fetched
from latentcache.remote.bucket import Bucket
from latentcache.remote.bucket_store import BucketStore


def test_the_order_is_that_of_the_directory(tmp_path: Path, s3_url: str) -> None:
    cache = make_cache(tmp_path / "cache")
    assert main(["push", str(cache), s3_url]) == 0
    found = []
    for where, options in ((cache, {}), (s3_url, {"local": tmp_path / "local"})):
        dataset = LatentDataset(where, order="packs", **options)
        with LatentLoader(BucketBatchSampler(dataset, 4, seed=1, window=2), device="cpu") as loader:
            found.append([batch["sample_id"] for batch in loader])
        dataset.cache.close()
    assert isinstance(dataset.cache.store, BucketStore)
    assert found[0] == found[1] and len(sum(found[0], [])) == len(dataset)  # noqa: RUF017 - few
    packs = {path.name for path in (cache / "packs").rglob("*.safetensors")}
    assert packs <= {path.name for path in (tmp_path / "local").rglob("*.safetensors")}, "they came whole"


def test_without_a_local_directory_packs_come_whole_and_once(
    tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tmp_path / "cache")
    assert main(["push", str(cache), s3_url]) == 0
    ranges, asked = Bucket.ranges, []

    def noted(bucket: Bucket, pack: str, wanted: Sequence[tuple[int, int]]) -> list[memoryview]:
        asked.append((pack, [num for _, num in wanted]))
        return ranges(bucket, pack, wanted)

    monkeypatch.setattr(Bucket, "ranges", noted)
    dataset, near = LatentDataset(s3_url, order="packs"), LatentDataset(cache, order="packs")
    loaders = [LatentLoader(BucketBatchSampler(each, 4, seed=1, window=2), device="cpu") for each in (dataset, near)]
    asked.clear()  # what the packs say of themselves was read by ranges
    with loaders[0] as loader, loaders[1] as directory:
        for batch, wanted in zip(loader, directory, strict=True):
            assert batch["sample_id"] == wanted["sample_id"] and torch.equal(batch["latents"], wanted["latents"])
    packs = {path.stem: path.stat().st_size for path in (cache / "packs").rglob("*.safetensors")}
    assert sorted(asked) == sorted((pack, [num_bytes]) for pack, num_bytes in packs.items())
    # A DataLoader's workers read for themselves: nothing is brought into the process that deals the batches.
    asked.clear()
    assert len(list(BucketBatchSampler(dataset, 4, window=2))) and not asked
    dataset.cache.close()
    near.cache.close()


def copy_packs(bucket: Bucket, directory: Path, groups: list[range]) -> None:
    """Packs of the images of each group, which the bucket may have already, as during a compaction's grace time."""
    with DiskStore(directory) as store:
        for numbers in groups:
            store.add(entries_of(number)[0] for number in numbers)
    for path in (directory / "packs").rglob("*.safetensors"):
        bucket.send(path.stem, path)


def test_a_row_of_each_pack_that_waits_for_long_leaves_room_for_the_next_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rows of rare buckets do, whose batches are full after many packs."""
    monkeypatch.setattr(fetched, "MAX_AHEAD", 4)
    ranges, whole = Bucket.ranges, []
    monkeypatch.setattr(Bucket, "ranges", lambda b, pack, wanted: whole.append(len(wanted)) or ranges(b, pack, wanted))
    bucket = Bucket(MemoryStore(), "memory://late")
    bucket.check(create=True)
    groups = [range(first, first + 8) for first in range(0, 80, 8)]
    copy_packs(bucket, tmp_path / "packs", groups)
    with BucketStore(bucket) as store:
        keys = [[entries_of(number)[0].record.key for number in group] for group in groups]
        Places.of(store, keys[0])
        whole.clear()
        for pack in keys:
            store.prefetch(pack)
            assert len(store.rows(pack[1:4])) == 3 and len(store.rows(pack[4:])) == 4
        assert whole == [1] * len(groups), "each pack comes whole"
        late = [pack[0] for pack in keys]
        assert len(store.rows(late)) == len(late), "what was released is fetched again"


@pytest.mark.parametrize("writes", [False, True])
def test_machines_that_saw_packs_come_and_fresh_ones_have_one_order(tmp_path: Path, writes: bool) -> None:
    keys = [entries_of(number)[0].record.key for number in range(16)]
    for number in range(6):  # ids are random: the later packs may come before or after the first one
        bucket = Bucket(MemoryStore(), "memory://machines")
        bucket.check(create=True)
        copy_packs(bucket, tmp_path / f"{number}-first", [range(16)])
        with BucketStore(bucket, local=tmp_path / f"{number}-tier") as old, BucketStore(bucket) as also_old:
            first = Places.of(old, keys)
            assert Places.of(also_old, keys).identity == first.identity
            copy_packs(bucket, tmp_path / f"{number}-more", [range(8), range(8, 16)])
            if writes:
                with DiskStore(tmp_path / f"{number}-own") as own:
                    own.add([entries_of(99)[0], *(entries_of(number)[0] for number in range(4))])
                [path] = (tmp_path / f"{number}-own" / "packs").rglob("*.safetensors")
                bucket.send(path.stem, path)
                row = bucket.row(path.stem, path.stat().st_size)
                assert old.index.add(row) == 1 and also_old.index.add(row) == 1
            found = []
            for store in (old, also_old):
                store.index.refresh()
                found.append(Places.of(store, keys))
            with BucketStore(bucket, local=tmp_path / f"{number}-tier", read_only=True) as again:
                found.append(Places.of(again, keys))
            with BucketStore(bucket) as fresh:
                found.append(Places.of(fresh, keys))
        assert len({places.identity for places in found}) == 1


def sampled(folder: Path, caches: list[Path], rank: int) -> None:
    """A rank of its own process: what it would read is written to a file, or the error."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    try:
        dataset = LatentDataset(caches[rank], order="packs")
        found = str([list(map(int, batch)) for batch in BucketBatchSampler(dataset, 4, rank=rank, world_size=2)])
    except StoreError as error:
        found = f"error: {error}"
    (folder / str(rank)).write_text(found)
    dist.destroy_process_group()


@pytest.mark.parametrize("differ", [False, True])
def test_ranks_that_see_other_packs_are_refused(tmp_path: Path, differ: bool) -> None:
    caches = [make_cache(tmp_path / name) for name in ("here", "there")]
    context = multiprocessing.get_context("spawn")
    arguments = [(tmp_path, caches if differ else caches[:1] * 2, rank) for rank in range(2)]
    ranks = [context.Process(target=sampled, args=each) for each in arguments]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == 0
    texts = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    if differ:
        assert texts[0] == texts[1] and "rank 1 sees other packs than rank 0" in texts[0]
    else:
        batches = [json.loads(text) for text in texts]
        assert sorted(item for share in batches for batch in share for item in batch) == list(range(48))
