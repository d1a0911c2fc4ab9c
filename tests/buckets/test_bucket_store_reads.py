"""Entries of a bucket: what is kept on this machine, what other readers see, what is damaged there, and pack order."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.remote_samples import entries_by_key, entries_of, make_cache, make_manifest, packs_of, replace_packs
from obstore.store import MemoryStore

from latentcache import BucketBatchSampler, DiskStore, LatentDataset, LatentLoader
from latentcache.dataset.row_table import Ref, RowTable
from latentcache.errors import EntryDamagedError, RemoteError, StoreError
from latentcache.loading.sampler import Places
from latentcache.remote.bucket import BucketTransport
from latentcache.remote.index import FarIndex
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.store import RemoteStore
from latentcache.remote.transfer import transfer
from latentcache.remote.transport import ANY_VERSION, packs_in, removals_in
from latentcache.remote.upkeep import prune, verify
from latentcache.store.base import Store
from latentcache.store.directory import pack_name
from latentcache.store.pack import read_row
from latentcache.types import Refusal

ENTRIES = entries_by_key(range(24))
KEYS = list(ENTRIES)
IMAGES = [key for key, entry in ENTRIES.items() if entry.record.kind == "image"]


class CountingBucket(BucketTransport):
    """A bucket that notes which packs are read whole, and may `refuse` to give a pack, its header or the whole."""

    def __init__(self, store: MemoryStore):
        super().__init__(store, "memory://counted")
        self.packs_read: list[str] = []
        self.refuse: Callable[[str, bool], None] | None = None

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> tuple[memoryview, str]:
        if name.startswith("packs/"):
            if num_bytes is None:
                self.packs_read.append(Path(name).stem)
            if self.refuse is not None:
                self.refuse(name, num_bytes is None)
        return super().read(name, start, num_bytes)


@pytest.fixture
def objects(tmp_path: Path) -> MemoryStore:
    """A bucket with the entries of 24 samples in three packs, and their manifest."""
    store = MemoryStore()
    bucket = BucketTransport(store, "memory://filled")
    bucket.check(create=True)
    with RemoteStore(bucket, local=tmp_path / "filling") as filled:
        for first in range(0, 24, 8):
            assert filled.add(entries_by_key(range(first, first + 8)).values()) == 9
    RemoteManifests(bucket).write(make_manifest(numbers=range(24)))
    return store


@pytest.fixture
def bucket(objects: MemoryStore) -> CountingBucket:
    return CountingBucket(objects)


def assert_right(store: Store, keys: list[str]) -> None:
    for key, rows in zip(keys, store.rows(keys), strict=True):
        for (name, _), array in zip(rows.description.items(), rows.arrays, strict=True):
            assert torch.equal(torch.from_numpy(array[0].copy()), ENTRIES[key].tensors[name])


def damage(bucket: BucketTransport, key: str) -> str:
    """Change a bit of an image's value there. Returns the pack."""
    needle = ENTRIES[key].tensors["moments"].numpy().tobytes()
    for pack in packs_in(bucket):
        data = bytearray(bucket.read(pack_name(pack))[0])
        if (at := data.find(needle)) >= 0:
            data[at + 3] ^= 1
            bucket.write(pack_name(pack), bytes(data), version=ANY_VERSION)
            return pack
    raise AssertionError(key)


def test_packs_that_are_compacted_away_are_looked_for_elsewhere_and_leave_this_disk(
    bucket: CountingBucket, tmp_path: Path
) -> None:
    """By a store that is open, and by one that is opened later. Those of another cache stay."""
    other = BucketTransport(MemoryStore(), "memory://other")
    other.check(create=True)
    with RemoteStore(other, local=tmp_path / "local") as another:
        another.add(ENTRIES.values())
        assert_right(another, KEYS)

    def assert_looked_for_elsewhere(store: RemoteStore) -> None:
        assert_right(store, KEYS)
        assert store.find(KEYS) == set(KEYS)
        kept = {path.stem for path in (tmp_path / "local").glob("*/packs/*/*.safetensors")}
        assert kept.isdisjoint(old) and packs_in(other).keys() <= kept

    with RemoteStore(bucket, local=tmp_path / "local") as store:
        assert_right(store, IMAGES[:1])
        bucket.remove(map(pack_name, old := replace_packs(bucket)))
        assert_looked_for_elsewhere(store)
    bucket.remove(map(pack_name, old := replace_packs(bucket)))
    with RemoteStore(bucket, local=tmp_path / "local") as store:
        assert_looked_for_elsewhere(store)


def test_a_damaged_entry_is_an_error_and_others_of_its_pack_are_read(
    bucket: CountingBucket, objects: MemoryStore, tmp_path: Path
) -> None:
    pack = damage(bucket, IMAGES[3])
    bucket.packs_read.clear()
    with RemoteStore(bucket, local=tmp_path / "local") as store:
        with pytest.raises(EntryDamagedError, match=r"digest.*latentcache verify.*latentcache precache") as caught:
            store.rows(IMAGES[:8])
        assert caught.value.key == IMAGES[3] and bucket.packs_read.count(pack) == 2
        assert store.find(KEYS) == set(KEYS) - {IMAGES[3]} and store.damaged().keys() == {IMAGES[3]}
        assert_right(store, [key for key in KEYS if key != IMAGES[3]])
        for call in (store.get, store.record, store.describe):
            with pytest.raises(EntryDamagedError):
                call(IMAGES[3])
        assert bucket.packs_read.count(pack) == 2
        assert store.add(ENTRIES.values()) == 1, "what is damaged counts as absent"
        assert_right(store, KEYS)
    with RemoteStore(CountingBucket(objects), local=tmp_path / "other") as store:
        assert sorted(store.keys()) == sorted(KEYS), "each once"
        assert_right(store, KEYS)
        assert store.find(KEYS) == set(KEYS)


def test_verify_makes_what_is_damaged_a_miss_for_all(
    bucket: CountingBucket,
    objects: MemoryStore,
    tmp_path: Path,
    run_json: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pack = damage(bucket, IMAGES[3])
    reader = RemoteStore(CountingBucket(objects), local=tmp_path / "reader")
    assert_right(reader, IMAGES[:1])
    monkeypatch.setattr(BucketTransport, "open", lambda url, **_: bucket)
    code, report = run_json("verify", "s3://team/cache")
    assert code == 1 and report["damaged"].keys() == {IMAGES[3]}
    assert (report["num_entries"], report["num_packs"]) == (len(KEYS), 3)
    assert list(removals_in(bucket)) == [pack]
    again = verify(bucket)
    assert not again.ok and not again.damaged and again.known_damaged.keys() == {IMAGES[3]}, "until it is made again"
    prune(bucket, grace_h=0)
    assert pack in packs_in(bucket), "what is not made again yet is not taken for there"
    with RemoteStore(CountingBucket(objects), local=tmp_path / "local") as store:
        assert store.find(KEYS) == set(KEYS) - {IMAGES[3]}
        with pytest.raises(EntryDamagedError):
            store.get(IMAGES[3])
        assert_right(store, [key for key in KEYS if key != IMAGES[3]])
        assert store.add(ENTRIES.values()) == 1
        assert_right(store, KEYS)
    assert run_json("verify", "s3://team/cache")[0] == 0
    assert_right(reader, KEYS)
    reader.close()
    prune(bucket, grace_h=24)
    assert pack in packs_in(bucket)
    prune(bucket, grace_h=0)
    assert pack not in packs_in(bucket) and pack not in removals_in(bucket)


def test_packs_that_cannot_be_read_do_not_stop_the_rest(bucket: CountingBucket, tmp_path: Path) -> None:
    """One is refused, as one that lies in an archive, and one does not even say what it holds."""
    archived, damaged, _ = sorted(packs_in(bucket))
    refused = [archived]

    def refuse(name: str, is_whole: bool) -> None:
        if Path(name).stem in refused:
            raise RemoteError(bucket.url, "it is archived", "Check the credentials.", status=403)

    whole = bytes(bucket.read(pack_name(damaged))[0])
    bucket.write(pack_name(damaged), whole[:20] + b"?" + whole[21:], version=ANY_VERSION)
    bucket.refuse = refuse
    assert "archived" in verify(bucket).unreadable[archived]
    assert verify(bucket).unreadable.keys() == {archived, damaged}
    with RemoteStore(bucket, local=tmp_path / "local") as store:
        lost = set(KEYS) - store.find(KEYS)
        assert 16 <= len(lost) <= 18 and store.index.unreadable.keys() == {archived, damaged}
        bucket.refuse = None
        found = store.find(KEYS)
        assert not lost.isdisjoint(found) and len(found) < len(KEYS), "what was refused is asked for again"
        assert store.add(ENTRIES.values()) == len(KEYS) - len(found)
        assert_right(store, KEYS)
    bucket.refuse = refuse
    refused += packs_in(bucket)  # where all are refused the credentials are wrong
    for call in (FarIndex(bucket).refresh, lambda: verify(bucket)):
        with pytest.raises(RemoteError, match="credentials"):
            call()


def test_a_pack_that_is_listed_and_never_comes_is_an_error_in_the_end(bucket: CountingBucket, tmp_path: Path) -> None:
    def lacking(name: str, is_whole: bool) -> None:
        if is_whole:
            raise FileNotFoundError(name)

    bucket.refuse = lacking
    with RemoteStore(bucket, local=tmp_path / "local") as store:
        for call in (store.get, store.record, lambda key: store.rows([key])):
            with pytest.raises(EntryDamagedError, match="gone"):
                call(KEYS[0])


def test_what_samples_do_without_costs_no_list_of_packs(
    bucket: CountingBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caption that is not encoded, and the entries of a refused sample."""
    rows = dict(make_manifest(numbers=range(24)).rows)
    rows["0.png"] = replace(rows["0.png"], captions=(Ref.of_text("a caption", ""),))
    refused = make_manifest(numbers=range(30, 31)).rows["30.png"]
    rows["30.png"] = replace(refused, refusal=Refusal("30.png", "30.png", "corrupt", "it ends early"))
    listed = list[str]()
    with RemoteStore(bucket, local=tmp_path / "local") as store:
        store.find(KEYS)
        monkeypatch.setattr(bucket, "list", lambda folder: listed.append(folder) or {})
        assert not RowTable.of(rows).lacking(store.has).size and not listed


def test_an_error_while_packs_are_read_again_loses_nothing(bucket: CountingBucket, tmp_path: Path) -> None:
    def failing(name: str, is_whole: bool) -> None:
        raise RemoteError(bucket.url, "it is away", "Try again.")

    with RemoteStore(bucket, local=tmp_path / "local") as store:
        assert store.find(KEYS) == set(KEYS)
        old = replace_packs(bucket)
        bucket.remove([pack_name(old[0])])
        bucket.refuse = failing
        with pytest.raises(RemoteError):
            list(store.keys())
        bucket.refuse = None
        assert store.find(KEYS) == set(KEYS)
        assert_right(store, KEYS)


# Pack order: the batches of the directory, also with room for a few packs only


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
