"""Entries of a bucket: what is kept on this machine, what other readers see, and what is damaged there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.comparing_server import ComparingServer
from helpers.family_walks import FEW_WALKS, assert_same_batches, assert_same_entries, walked
from helpers.remote_samples import entries_of, make_cache, make_manifest, replace_packs
from obstore.store import MemoryStore

from latentcache import LatentCache
from latentcache.cli.app import main
from latentcache.config import Config
from latentcache.errors import EntryDamagedError, ReadOnlyError, RemoteError
from latentcache.loading.status import status
from latentcache.precache.run import run_precache
from latentcache.remote.bucket import BucketTransport
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.store import RemoteStore
from latentcache.remote.transport import ANY_VERSION, packs_in, removals_in
from latentcache.remote.upkeep import prune, verify
from latentcache.store.base import Store
from latentcache.store.directory import pack_name

ENTRIES = [entry for number in range(24) for entry in entries_of(number)]
KEYS = list(dict.fromkeys(entry.record.key for entry in ENTRIES))
IMAGES = [entry.record.key for entry in ENTRIES if entry.record.kind == "image"]
EXPECTED = {entry.record.key: entry.tensors for entry in ENTRIES}


class CountingBucket(BucketTransport):
    """A bucket that counts what is read, and may `refuse` to give it."""

    def __init__(self, store: Any, url: str = "memory://counted", refuse: Callable[[str, bool], None] | None = None):
        super().__init__(store, url)
        self.headers_read: list[str] = []
        self.packs_read: list[str] = []
        self.refuse = refuse

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> tuple[memoryview, str]:
        if name.startswith("packs/"):
            (self.packs_read if num_bytes is None else self.headers_read).append(Path(name).stem)
        if self.refuse is not None:
            self.refuse(name, num_bytes is None)
        return super().read(name, start, num_bytes)


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[MemoryStore]:
    """A bucket with the entries of 24 samples in three packs, and their manifest."""
    store = MemoryStore()
    bucket = BucketTransport(store, "memory://filled")
    bucket.check(create=True)
    with RemoteStore(bucket, local=tmp_path / "filling") as filled:
        for first in range(0, 24, 8):
            assert filled.add(entry for number in range(first, first + 8) for entry in entries_of(number)) == 9
    RemoteManifests(bucket).write(make_manifest(num_samples=24))
    yield store


def assert_right(store: Store, keys: list[str]) -> None:
    for key, rows in zip(keys, store.rows(keys), strict=True):
        for (name, _), array in zip(rows.description.items(), rows.arrays, strict=True):
            assert torch.equal(torch.from_numpy(array[0].copy()), EXPECTED[key][name])


def damage(bucket: BucketTransport, key: str) -> str:
    """Change a bit of an image's value there. Returns the pack."""
    needle = EXPECTED[key]["moments"].numpy().tobytes()
    for pack in packs_in(bucket):
        data = bytearray(bucket.read(pack_name(pack))[0])
        if (at := data.find(needle)) >= 0:
            data[at + 3] ^= 1
            bucket.write(pack_name(pack), bytes(data), version=ANY_VERSION)
            return pack
    raise AssertionError(key)


def test_packs_come_whole_are_kept_and_shared(objects: MemoryStore, tmp_path: Path) -> None:
    bucket = CountingBucket(objects)
    with RemoteStore(bucket, local=tmp_path / "local") as store:
        assert_right(store, IMAGES[:1])
        assert len(bucket.headers_read) == 3 and len(bucket.packs_read) == 1
        assert_right(store, KEYS)
        assert sorted(bucket.packs_read) == sorted(packs_in(bucket))
        entry = store.get(KEYS[0])
        assert entry.record == ENTRIES[0].record and store.record(KEYS[1]) == ENTRIES[1].record
    other = CountingBucket(objects)
    with RemoteStore(other, local=tmp_path / "local", read_only=True) as store:
        assert_right(store, KEYS)
        assert not other.headers_read and not other.packs_read
        with pytest.raises(ReadOnlyError):
            store.add(ENTRIES[:1])


def test_without_a_folder_packs_lie_in_that_of_the_user(s3_url: str, tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache")
    assert main(["push", str(cache), s3_url]) == 0
    with LatentCache(s3_url) as there, LatentCache(cache) as here:
        ids = here.sample_ids()[::2]
        assert torch.equal(there.batch(ids, device="cpu")["latents"], here.batch(ids, device="cpu")["latents"])
    assert len(list((tmp_path / "xdg" / "latentcache").glob("*/packs/*/*.safetensors"))) == 3


def test_a_pack_that_was_compacted_away_is_looked_for_elsewhere(objects: MemoryStore, tmp_path: Path) -> None:
    bucket = CountingBucket(objects)
    with RemoteStore(bucket, local=tmp_path / "local") as store:
        assert_right(store, IMAGES[:1])
        old = packs_in(bucket)
        replace_packs(bucket)
        bucket.remove(map(pack_name, old))
        assert_right(store, KEYS)
        assert store.find(KEYS) == set(KEYS)
        assert not {path.stem for path in (tmp_path / "local").glob("*/packs/*/*")} & old.keys(), "they are of no use"


def test_packs_that_went_while_nobody_looked_leave_this_disk(objects: MemoryStore, tmp_path: Path) -> None:
    bucket, other = BucketTransport(objects, "memory://counted"), BucketTransport(MemoryStore(), "memory://other")
    other.check(create=True)
    with (
        RemoteStore(bucket, local=tmp_path / "local") as store,
        RemoteStore(other, local=tmp_path / "local") as another,
    ):
        assert_right(store, KEYS)
        another.add(ENTRIES)
        assert_right(another, KEYS)
    old = replace_packs(bucket)
    bucket.remove(map(pack_name, old))
    with RemoteStore(bucket, local=tmp_path / "local") as store:
        assert_right(store, KEYS)
    kept = {path.stem for path in (tmp_path / "local").glob("*/packs/*/*.safetensors")}
    assert kept == packs_in(bucket).keys() | packs_in(other).keys(), "those of another cache stay"


def test_a_damaged_entry_is_an_error_and_others_of_its_pack_are_read(objects: MemoryStore, tmp_path: Path) -> None:
    bucket = CountingBucket(objects)
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
        assert store.add(ENTRIES) == 1, "what is damaged counts as absent"
        assert_right(store, KEYS)
    with RemoteStore(CountingBucket(objects), local=tmp_path / "other") as store:
        assert_right(store, KEYS)
        assert store.find(KEYS) == set(KEYS)


def test_verify_makes_what_is_damaged_a_miss_for_all(objects: MemoryStore, tmp_path: Path) -> None:
    bucket = CountingBucket(objects)
    pack = damage(bucket, IMAGES[3])
    reader = RemoteStore(CountingBucket(objects), local=tmp_path / "reader")
    assert_right(reader, IMAGES[:1])
    report = verify(bucket)
    assert report.damaged.keys() == {IMAGES[3]} and report.num_entries == len(KEYS)
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
        assert store.add(ENTRIES) == 1
        assert_right(store, KEYS)
    assert verify(bucket).ok
    assert_right(reader, KEYS)
    reader.close()
    prune(bucket, grace_h=24)
    assert pack in packs_in(bucket)
    prune(bucket, grace_h=0)
    assert pack not in packs_in(bucket) and pack not in removals_in(bucket)


def test_a_pack_that_does_not_even_say_what_it_holds(objects: MemoryStore, tmp_path: Path) -> None:
    bucket = CountingBucket(objects)
    pack = min(packs_in(bucket))
    whole = bytes(bucket.read(pack_name(pack))[0])
    bucket.write(pack_name(pack), whole[:20] + b"?" + whole[21:], version=ANY_VERSION)
    assert list(verify(bucket).unreadable) == [pack]
    with RemoteStore(bucket, local=tmp_path / "local") as store:
        lost = set(KEYS) - store.find(KEYS)
        assert 8 <= len(lost) <= 9
        assert store.add(ENTRIES) == len(lost)
        assert_right(store, KEYS)


def test_precache_fills_a_bucket_and_others_read_it(
    make_config: Callable[..., Config], s3_url: str, object_server: ComparingServer, tmp_path: Path, run: Any
) -> None:
    config = make_config(**{"cache.path": s3_url, "cache.local": tmp_path / "local"})
    assert run_precache(config).num_encoded > 5
    names = [name.partition("/cache/")[2] for name in object_server.objects]
    assert "CACHE.json" in names and any(name.startswith("packs/") for name in names)
    assert not any("unfinished" in name or name.startswith("probe") for name in names)
    again = run_precache(config)
    assert again.num_encoded == again.num_misses == 0 and again.to_json()["cache"]["path"] == s3_url
    run_precache(here := make_config())
    with LatentCache(s3_url, local=tmp_path / "other") as cache, LatentCache(here.cache) as expected:
        ids = cache.sample_ids()
        assert ids == expected.sample_ids() and len(ids) == 5
        assert set(cache.store.keys()) == set(expected.store.keys())
        for sample_id in ids:
            batch, wanted = (each.batch([sample_id], device="cpu") for each in (cache, expected))
            assert torch.equal(batch["latents"], wanted["latents"])
    code, out, _ = run("status", s3_url)
    assert code == 0 and s3_url in out and status(s3_url).num_lost == status(s3_url).num_unused == 0


def test_a_dry_run_into_a_bucket_that_is_no_cache_yet_writes_nothing(
    make_config: Callable[..., Config], s3_url: str, object_server: ComparingServer
) -> None:
    report = run_precache(make_config(**{"cache.path": s3_url}), dry_run=True)
    assert report.num_misses > 5 and not object_server.objects


@pytest.mark.parametrize("family", FEW_WALKS)
def test_a_cache_of_a_family_moves_to_a_bucket_and_back(
    family: str, tmp_path: Path, s3_url: str, run_json: Callable[..., Any]
) -> None:
    config = walked(tmp_path, family)
    for command in (
        ("push", config.cache.path, s3_url),
        ("verify", s3_url),
        ("prune", s3_url),
        ("pull", s3_url, tmp_path / "pulled"),
    ):
        code, report = run_json(*command)
        assert code == 0, (command, report)
    with LatentCache(config.cache.path) as cached, LatentCache(tmp_path / "pulled") as pulled:
        with LatentCache(s3_url, local=tmp_path / "local") as remote:
            assert_same_batches(remote, cached)
        assert_same_entries(pulled.store, cached.store)
        names = cached.manifests.names()
        assert all(pulled.manifests.read(each) == cached.manifests.read(each) for each in names)


def test_a_pack_that_is_listed_and_never_comes_is_an_error_in_the_end(objects: MemoryStore, tmp_path: Path) -> None:
    def lacking(name: str, is_whole: bool) -> None:
        if is_whole and name.startswith("packs/"):
            raise FileNotFoundError(name)

    with RemoteStore(CountingBucket(objects, refuse=lacking), local=tmp_path / "local") as store:
        for call in (store.get, store.record, lambda key: store.rows([key])):
            with pytest.raises(EntryDamagedError, match="gone"):
                call(KEYS[0])


def test_an_error_while_packs_are_read_again_loses_nothing(objects: MemoryStore, tmp_path: Path) -> None:
    def failing(name: str, is_whole: bool) -> None:
        raise RemoteError(bucket.url, "it is away", "Try again.")

    bucket = CountingBucket(objects)
    with RemoteStore(bucket, local=tmp_path / "local") as store:
        assert store.find(KEYS) == set(KEYS)
        old = list(packs_in(bucket))
        replace_packs(bucket)
        bucket.remove([pack_name(old[0])])
        bucket.refuse = failing
        with pytest.raises(RemoteError):
            list(store.keys())
        bucket.refuse = None
        assert store.find(KEYS) == set(KEYS)
        assert_right(store, KEYS)
