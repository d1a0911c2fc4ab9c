"""Entries of a bucket: what is fetched, what is kept on this machine, and what other readers see."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.remote_samples import entries_of, make_cache, make_manifest
from helpers.swift_server import SwiftServer
from obstore.store import MemoryStore

from latentcache import LatentCache
from latentcache.cli.app import main
from latentcache.config import Config
from latentcache.errors import EntryDamagedError, EntryMissingError, ReadOnlyError, StorageFullError, StoreError
from latentcache.loading.status import status
from latentcache.precache.run import run_precache
from latentcache.remote.bucket import Bucket
from latentcache.remote.bucket_index import BucketIndex
from latentcache.remote.bucket_manifests import BucketManifests
from latentcache.remote.bucket_store import BucketStore
from latentcache.remote.bucket_upkeep import BucketUpkeep
from latentcache.store import DiskStore
from latentcache.store.base import Store
from latentcache.store.directory import pack_name
from latentcache.store.exchange import take_pack
from latentcache.store.index import Index
from latentcache.store.stacking import read_batch
from latentcache.store.upkeep import prune

ENTRIES = [entry for number in range(24) for entry in entries_of(number)]
KEYS = list(dict.fromkeys(entry.record.key for entry in ENTRIES))
IMAGES = [entry.record.key for entry in ENTRIES if entry.record.kind == "image"]


class CountingBucket(Bucket):
    """A bucket that counts what is read, and may give other bytes."""

    def __init__(self, store: Any, url: str = "memory://counted"):
        super().__init__(store, url)
        self.ranges_read: list[str] = []
        self.packs_read: list[str] = []
        self.rows_read: list[str] = []
        self.change: Callable[[bytes], bytes] | None = None

    def ranges(self, pack: str, ranges: Any) -> list[memoryview]:
        self.ranges_read.append(pack)
        parts = super().ranges(pack, ranges)
        return parts if self.change is None else [memoryview(self.change(bytes(part))) for part in parts]

    def chunks(self, pack: str) -> Any:
        self.packs_read.append(pack)
        for chunk in super().chunks(pack):
            yield chunk if self.change is None else self.change(chunk)

    def row(self, pack: str, num_bytes: int) -> Any:
        self.rows_read.append(pack)
        return super().row(pack, num_bytes)


@pytest.fixture
def objects() -> MemoryStore:
    """A bucket with the entries of 24 samples in three packs, and their manifest."""
    store = MemoryStore()
    bucket = Bucket(store, "memory://filled")
    with BucketStore(bucket, create=True) as filled:
        for first in range(0, 24, 8):
            assert filled.add(entry for number in range(first, first + 8) for entry in entries_of(number)) == 9
    BucketManifests(bucket).write(make_manifest(num_samples=24))
    return store


def moments(store: Store, keys: list[str]) -> torch.Tensor:
    return read_batch(store, keys)["moments"]


EXPECTED = {entry.record.key: entry.tensors for entry in ENTRIES}


def assert_right(store: Store, keys: list[str]) -> None:
    for key, rows in zip(keys, store.rows(keys), strict=True):
        for (name, _), array in zip(rows.description.items(), rows.arrays, strict=True):
            assert torch.equal(torch.from_numpy(array[0].copy()), EXPECTED[key][name])


def test_without_a_local_directory_entries_come_by_ranges(objects: MemoryStore) -> None:
    bucket = CountingBucket(objects)
    with BucketStore(bucket, read_only=True) as store:
        assert store.find(KEYS) == set(KEYS)
        heads = len(bucket.ranges_read)
        assert_right(store, IMAGES[:4])
        assert len(bucket.ranges_read) == heads + 1, "one request for the entries of a pack"
        assert_right(store, KEYS)
        assert not bucket.packs_read and store.generation is None
        entry = store.get(KEYS[0])
        assert entry.record == ENTRIES[0].record and store.record(KEYS[1]) == ENTRIES[1].record
        with pytest.raises(ReadOnlyError):
            store.add(ENTRIES[:1])


def test_packs_are_kept_whole_and_shared_by_processes(objects: MemoryStore, tmp_path: Path) -> None:
    bucket = CountingBucket(objects)
    with BucketStore(bucket, local=tmp_path / "local") as store:
        assert_right(store, IMAGES[:1])
        assert len(bucket.packs_read) == 1
        for _ in range(2):
            assert_right(store, KEYS)
        assert len(bucket.packs_read) == len(set(bucket.packs_read)) == 3
        rows = len(bucket.rows_read)
        for _ in range(10):
            store.rows(KEYS)
        assert store.generation is not None
    again = CountingBucket(objects)
    with BucketStore(again, local=tmp_path / "local") as store:
        store.prefetch(KEYS)
        assert_right(store, KEYS)
        assert store.get(KEYS[0]).record == ENTRIES[0].record
        assert rows == 3 and not (again.rows_read or again.packs_read or again.ranges_read), "all is here"


def test_a_small_local_directory_is_not_filled_with_what_will_not_fit(objects: MemoryStore, tmp_path: Path) -> None:
    bucket = CountingBucket(objects)
    [size, *_] = bucket.packs().values()
    with BucketStore(bucket, local=tmp_path / "local", local_max_bytes=size + size // 2) as store:
        assert_right(store, IMAGES[:2])
        assert not bucket.packs_read, "two of nine entries: by ranges"
        for first in range(0, 24, 8):
            assert_right(store, IMAGES[first : first + 8])
        assert len(bucket.packs_read) == 3, "most of each pack was wanted"
    kept = DiskStore(tmp_path / "local", read_only=True).stats()
    assert 0 < kept.file_bytes <= size + size // 2


def test_a_pack_for_which_there_is_no_room_is_fetched_once(objects: MemoryStore, tmp_path: Path) -> None:
    bucket = CountingBucket(objects)
    with BucketStore(bucket, local=tmp_path / "local", local_max_bytes=1000) as store:
        assert_right(store, IMAGES[:8])
    assert not bucket.packs_read, "it would be removed again before it is read"


def test_a_pack_that_another_process_removes_right_after_it_was_kept_is_read(
    objects: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_then_lose(disk: DiskStore, *pack: Any) -> int:
        num_new = take_pack(disk, *pack)
        with DiskStore(tmp_path / "local") as other:
            prune(other, (), max_bytes=0)
        disk.catalog.reload()  # as another thread does, which looks for a pack
        return num_new

    monkeypatch.setattr("latentcache.remote.local_tier.take_pack", take_then_lose)
    with BucketStore(CountingBucket(objects), local=tmp_path / "local") as store:
        assert_right(store, KEYS)


def test_a_full_disk_ends_no_reading(
    objects: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(index: Index, rows: object) -> None:
        raise StorageFullError(tmp_path, 4096)

    with BucketStore(CountingBucket(objects), local=tmp_path / "local") as store:
        assert_right(store, KEYS)
        Bucket(objects, "x").remove_packs(sorted(Bucket(objects, "x").packs())[:1])
        with BucketStore(CountingBucket(objects)) as other:
            other.add(entries_of(30))
        monkeypatch.setattr(Index, "replace_many", full)
        monkeypatch.setattr(Index, "remove_many", full)
        assert store.find([entries_of(30)[0].record.key]), "what is new is found"
        assert len(store.index.table.find(KEYS)) == 18, "and what is gone is gone"
        assert_right(store, sorted(store.index.table.find(KEYS)))
    assert "no space left" in caplog.text and "is not kept there" in caplog.text


def test_rows_of_packs_are_remembered_and_a_damaged_memory_is_made_again(
    objects: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for expected in (3, 0):
        bucket = CountingBucket(objects)
        assert BucketIndex(bucket, tmp_path / "rows").find(KEYS) == set(KEYS)
        assert len(bucket.rows_read) == expected
    (tmp_path / "rows" / "cache.db").write_bytes(b"no database" * 1000)
    bucket = CountingBucket(objects)
    assert BucketIndex(bucket, tmp_path / "rows").find(KEYS) == set(KEYS)
    assert len(bucket.rows_read) == 3 and "are read again" in caplog.text


def test_what_another_machine_adds_removes_and_adds_again_is_seen(objects: MemoryStore) -> None:
    mine, theirs = (BucketStore(CountingBucket(objects)) for _ in range(2))
    new = entries_of(30)[0]
    assert mine.find([new.record.key]) == set()
    theirs.add([new])
    assert mine.find([new.record.key]) == {new.record.key}
    assert torch.equal(moments(mine, [new.record.key])[0], new.tensors["moments"])
    assert theirs.remove([new.record.key, KEYS[0]]) == 2 and theirs.remove([new.record.key]) == 0
    with BucketStore(CountingBucket(objects)) as later:
        assert later.find([new.record.key, *KEYS]) == set(KEYS[1:]), "a removed key does not come back for new readers"
        assert later.damaged() == {}
        assert later.add([new]) == 1
    assert mine.find([new.record.key]) == {new.record.key}
    mine.keys()
    assert mine.find([KEYS[0]]) == set()
    assert len(set(mine.keys())) == len(KEYS)


def test_a_key_in_two_packs_is_one_entry_and_is_removed_from_both(objects: MemoryStore, tmp_path: Path) -> None:
    with DiskStore(tmp_path / "other") as other:  # as another machine encodes the same and pushes
        other.add(ENTRIES)
        [(pack, _)] = other.directory.pack_sizes().items()
        Bucket(objects, "x").send(pack, other.directory.pack_path(pack))
    with BucketStore(CountingBucket(objects)) as store:
        assert sum(store.stats().num_entries.values()) == len(KEYS) == len(list(store.keys()))
        assert store.stats().num_packs == 4
        assert store.remove(KEYS[:2]) == 2
    with BucketStore(CountingBucket(objects)) as store:
        assert store.find(KEYS) == set(KEYS[2:])


@pytest.mark.parametrize("local", [False, True])
def test_a_pack_that_was_compacted_away_is_looked_for_elsewhere(
    objects: MemoryStore, tmp_path: Path, local: bool
) -> None:
    options = {"local": tmp_path / "local"} if local else {}
    bucket = CountingBucket(objects)
    with BucketStore(bucket, **options) as store:
        assert store.find(KEYS) == set(KEYS)
        with DiskStore(tmp_path / "other") as other:
            other.add(ENTRIES)
            [(pack, _)] = other.directory.pack_sizes().items()
            old = bucket.packs()
            bucket.send(pack, other.directory.pack_path(pack))
        bucket.remove_packs(old)
        assert_right(store, KEYS)
        assert store.tier is None or store.tier.has_room(0), "it keeps packs as before"
        bucket.remove_packs([pack])
        if not local:
            with pytest.raises(EntryMissingError):
                store.rows(KEYS[:1])


@pytest.mark.parametrize("local", [False, True])
def test_a_damaged_entry_is_a_miss_for_all_and_others_of_its_pack_are_read(
    objects: MemoryStore, tmp_path: Path, local: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = CountingBucket(objects)
    index = BucketIndex(bucket)
    [place] = index.look_up(IMAGES[:1])
    assert place is not None
    found = bucket.read(pack_name(place.pack.id))
    assert found is not None
    data = bytearray(found.data)
    data[place.ranges()[0][0]] ^= 1
    bucket.put(pack_name(place.pack.id), bytes(data))
    with BucketStore(bucket, **({"local": tmp_path / "local"} if local else {})) as store:
        with pytest.raises(EntryDamagedError, match="digest"):
            store.rows(KEYS)
        assert store.find(IMAGES) == set(IMAGES[1:]) and store.damaged().keys() == {IMAGES[0]}
        assert_right(store, IMAGES[1:])
    with BucketStore(CountingBucket(objects)) as other:
        assert other.damaged().keys() == {IMAGES[0]} and other.stats().num_damaged == 1
        assert other.add(ENTRIES) == 1, "precache encodes it again"
        assert other.damaged() == {}
        assert_right(other, KEYS)


def test_what_is_damaged_on_its_way_is_fetched_again(objects: MemoryStore, tmp_path: Path) -> None:
    flips, share = iter([]), 0.0

    def change(data: bytes) -> bytes:
        at = int(share * len(data))
        return bytes(data[:at]) + bytes([data[at] ^ 1]) + bytes(data[at + 1 :]) if next(flips, False) else data

    bucket = CountingBucket(objects)
    bucket.change = change
    for options in ({}, {"local": tmp_path / "local"}):
        with BucketStore(bucket, **options) as store:
            flips, share = iter([True]), 0.0
            assert store.find(KEYS) == set(KEYS), "a header"
            flips, share = iter([True]), 0.5
            assert_right(store, KEYS)
            assert store.damaged() == {} and next(flips, None) is None


def test_a_reader_alone_marks_nothing_for_others(objects: MemoryStore) -> None:
    bucket = CountingBucket(objects)
    with BucketStore(bucket, read_only=True) as store:
        store.find(KEYS)
        bucket.change = lambda data: bytes(len(data))
        with pytest.raises(EntryDamagedError):
            store.rows(KEYS[:1])
        assert store.damaged().keys() == {KEYS[0]}
    with BucketStore(CountingBucket(objects), read_only=True) as other:
        assert other.damaged() == {} and not Bucket(objects, "x").names("marks")


def test_a_damaged_list_of_removed_entries_is_warned_of(objects: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    with BucketStore(CountingBucket(objects)) as store:
        store.remove(KEYS[:1])
    bucket = CountingBucket(objects)
    [name] = bucket.names("marks")
    for data in (b"{", b'{"rows": {"../x": {"0": ""}}}', b"[]"):
        bucket.put(name, data)
        caplog.clear()
        with caplog.at_level(logging.WARNING), BucketStore(CountingBucket(objects)) as store:
            assert store.find(KEYS) == set(KEYS)
        assert name in caplog.text


def test_upkeep_does_not_bring_back_what_was_removed(objects: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = CountingBucket(objects)
    monkeypatch.setattr(Bucket, "open", lambda url: bucket)
    with BucketStore(bucket) as store:
        store.remove(KEYS[:1])
        store.add(entries_of(40))
    report = BucketUpkeep("memory://counted", prune=False, grace_h=0).run()
    assert report.num_entries > 0 and report.num_listed > 0
    for _ in range(2):
        with BucketStore(CountingBucket(objects)) as store:
            assert store.find(KEYS) == set(KEYS[1:])
            assert_right(store, KEYS[1:])
        BucketUpkeep("memory://counted", prune=False, grace_h=0).run()
    assert not bucket.names("marks"), "its pack is gone"


def test_where_there_is_no_cache_the_error_says_so() -> None:
    with pytest.raises(StoreError, match="no cache here"):
        BucketStore(Bucket(MemoryStore(), "memory://none"))


def test_precache_fills_a_bucket_and_others_read_it(
    make_config: Callable[..., Config], s3_url: str, swift: SwiftServer, tmp_path: Path, run: Any
) -> None:
    config = make_config(**{"cache.path": s3_url, "cache.local": tmp_path / "local"})
    assert run_precache(config).num_encoded > 5
    names = [name.partition("/cache/")[2] for name in swift.names("tests") if name.startswith(s3_url[11:])]
    assert "CACHE.json" in names and any(name.startswith("packs/") for name in names)
    assert not any("unfinished" in name or name.startswith("probe") for name in names)
    again = run_precache(config)
    assert again.num_encoded == again.num_misses == 0 and again.to_json()["cache"]["path"] == s3_url
    here = make_config()
    run_precache(here)
    for local in (None, tmp_path / "other"):
        with LatentCache(s3_url, local=local) as cache, LatentCache(here.cache) as expected:
            ids = cache.sample_ids()
            assert ids == expected.sample_ids() and len(ids) == 5
            assert set(cache.store.keys()) == set(expected.store.keys())
            for sample_id in ids:
                batch, wanted = (each.batch([sample_id], device="cpu") for each in (cache, expected))
                assert torch.equal(batch["latents"], wanted["latents"])
    assert status(s3_url).num_lost == 0 and status(s3_url).num_unused == 0
    code, out, _ = run("status", s3_url)
    assert code == 0 and s3_url in out


def test_a_pushed_directory_is_read_in_place(tmp_path: Path, s3_url: str) -> None:
    cache = make_cache(tmp_path / "cache")
    assert main(["push", str(cache), s3_url]) == 0
    with LatentCache(s3_url, local=tmp_path / "local") as there, LatentCache(cache) as here:
        ids = here.sample_ids()[::2]
        assert torch.equal(
            there.batch(ids, device="cpu", output="moments")["moments"],
            here.batch(ids, device="cpu", output="moments")["moments"],
        )


def test_a_dry_run_into_a_bucket_that_is_no_cache_yet_writes_nothing(
    make_config: Callable[..., Config], s3_url: str, swift: SwiftServer
) -> None:
    before = swift.names("tests")
    report = run_precache(make_config(**{"cache.path": s3_url}), dry_run=True)
    assert report.num_misses > 5 and swift.names("tests") == before
