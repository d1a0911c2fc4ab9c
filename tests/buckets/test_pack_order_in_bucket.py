"""Pack order from an object store: the batches of the directory, also with room for a few packs only."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.remote_samples import entries_of, make_cache, packs_of
from obstore.store import MemoryStore

from latentcache import BucketBatchSampler, DiskStore, LatentDataset, LatentLoader
from latentcache.errors import StoreError
from latentcache.loading.sampler import Places
from latentcache.remote.bucket import BucketTransport
from latentcache.remote.store import RemoteStore
from latentcache.remote.transfer import transfer
from latentcache.remote.transport import ANY_VERSION
from latentcache.store.directory import pack_name
from latentcache.store.pack import read_row


def test_the_order_is_that_of_the_directory(tmp_path: Path, s3_url: str) -> None:
    cache = make_cache(tmp_path / "cache")
    assert transfer(cache, s3_url).ok
    found = []
    small = {"local": tmp_path / "small", "local_max_bytes": 1}
    for where, options in ((cache, {}), (s3_url, small), (s3_url, {"local": tmp_path / "local"})):
        dataset = LatentDataset(where, order="packs", **options)
        with LatentLoader(BucketBatchSampler(dataset, 4, seed=1, window=2), device="cpu") as loader:
            found.append([batch["sample_id"] for batch in loader])
        dataset.cache.close()
    assert isinstance(dataset.cache.store, RemoteStore)
    assert found[0] == found[1] == found[2] and len(sum(found[0], [])) == len(dataset)  # noqa: RUF017 - few
    came = {path.stem for path in (tmp_path / "local").rglob("*.safetensors")}
    assert packs_of(cache).keys() <= came, "they came whole"


@pytest.mark.parametrize("writes", [False, True])
def test_machines_that_saw_packs_come_and_fresh_ones_have_one_order(tmp_path: Path, writes: bool) -> None:
    keys = [entries_of(number)[0].record.key for number in range(16)]

    def send(bucket: BucketTransport, folder: Path, groups: list[range]) -> list[Path]:
        """Packs of the images of each group, which the bucket may have already, as during a compaction's grace time."""
        with DiskStore(folder) as store:
            for numbers in groups:
                store.add(entries_of(number)[0] for number in numbers)
        sent = list((folder / "packs").rglob("*.safetensors"))
        for path in sent:
            bucket.write(pack_name(path.stem), path.read_bytes(), version=ANY_VERSION)
        return sent

    for number in range(6):  # ids are random: the later packs may come before or after the first one
        folder, bucket = tmp_path / f"{number}", BucketTransport(MemoryStore(), "memory://machines")
        bucket.check(create=True)
        send(bucket, folder / "first", [range(16)])
        with (
            RemoteStore(bucket, local=folder / "tier") as old,
            RemoteStore(bucket, local=folder / "other") as also_old,
        ):
            assert Places.of(also_old, keys).identity == Places.of(old, keys).identity
            send(bucket, folder / "more", [range(8), range(8, 16)])
            if writes:
                [path] = send(bucket, folder / "own", [range(4)])
                for store in (old, also_old):
                    store.index.add(read_row(path))
            found = []
            for store in (old, also_old):
                store.index.refresh()
                found.append(Places.of(store, keys))
        for local in ("tier", "fresh"):
            with RemoteStore(bucket, local=folder / local, read_only=True) as store:
                found.append(Places.of(store, keys))
        assert len({places.identity for places in found}) == 1


def sampled(folder: Path, cases: dict[str, list[Path]], rank: int) -> None:
    """A rank of its own process: what it would read in each case is written to a file, or the error."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    for name, caches in cases.items():
        try:
            dataset = LatentDataset(caches[rank], order="packs")
            found = str([list(map(int, batch)) for batch in BucketBatchSampler(dataset, 4, rank=rank, world_size=2)])
        except StoreError as error:
            found = f"error: {error}"
        (folder / f"{name}-{rank}").write_text(found)
    dist.destroy_process_group()


def test_ranks_that_see_other_packs_are_refused(tmp_path: Path) -> None:
    here, there = (make_cache(tmp_path / name) for name in ("here", "there"))
    context = multiprocessing.get_context("fork")
    cases = {"same": [here, here], "other": [here, there]}
    ranks = [context.Process(target=sampled, args=(tmp_path, cases, rank)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == 0
    first, second = ((tmp_path / f"other-{rank}").read_text() for rank in range(2))
    assert first == second and "rank 1 sees other packs than rank 0" in first
    batches = [json.loads((tmp_path / f"same-{rank}").read_text()) for rank in range(2)]
    assert sorted(item for share in batches for batch in share for item in batch) == list(range(48))
