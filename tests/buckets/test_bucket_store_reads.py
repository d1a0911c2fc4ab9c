"""Entries of a bucket: what is kept on this machine, what other readers see, and what is damaged there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.remote_samples import entries_by_key, make_manifest, replace_packs
from obstore.store import MemoryStore

from latentcache.errors import EntryDamagedError, RemoteError
from latentcache.remote.bucket import BucketTransport
from latentcache.remote.index import FarIndex
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.store import RemoteStore
from latentcache.remote.transport import ANY_VERSION, packs_in, removals_in
from latentcache.remote.upkeep import prune, verify
from latentcache.store.base import Store
from latentcache.store.directory import pack_name

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
