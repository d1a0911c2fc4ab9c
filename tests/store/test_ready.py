"""What was read once is not compared again, and what a caller remembers goes when it is not true any more.

A caller may remember rows as long as the store's generation is equal (`Store.generation`), as the loader does.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
import xxhash
from store_samples import flip, key, mark, pack_of, packs, run, sample, samples

from latentcache.errors import EntryDamagedError, EntryMissingError, StoreError
from latentcache.store import DiskStore, Index, reader
from latentcache.store.catalog import Catalog
from latentcache.store.stacking import read_batch, stack
from latentcache.store.upkeep import compact, prune, verify

KEYS = [key(number) for number in range(6)]


@pytest.fixture
def store(tmp_path):
    with DiskStore(tmp_path / "cache") as store:
        for start in (0, 2, 4):
            store.add(samples(start, start + 1))
        yield store


def moments(*numbers):
    return torch.stack([sample(number).tensors["moments"] for number in numbers])


def read(store, *numbers):
    return read_batch(store, [key(number) for number in numbers])["moments"]


@pytest.fixture
def calls(monkeypatch):
    """Counts digests of payloads, and look-ups."""
    counts = {"digests": 0, "look_ups": 0}
    hasher, look_up = xxhash.xxh3_128, Catalog.look_up

    def counted_hasher(*args):
        counts["digests"] += 1
        return hasher(*args)

    def counted_look_up(self, keys):
        counts["look_ups"] += 1
        return look_up(self, keys)

    monkeypatch.setattr(xxhash, "xxh3_128", counted_hasher)
    monkeypatch.setattr(Catalog, "look_up", counted_look_up)
    return counts


def test_a_batch_is_looked_up_at_once(store, calls, monkeypatch):
    with DiskStore(store.path) as store:
        assert read(store, 3, 1, 4).equal(moments(3, 1, 4))
        assert calls == {"digests": 3, "look_ups": 1}


def test_each_entry_is_verified_once(store, calls):
    for _ in range(3):
        assert read(store, *range(6)).equal(moments(*range(6)))
        assert read(store, 1).equal(moments(1))
    store.remove([key(5)])
    assert read(store, *range(5)).equal(moments(*range(5)))
    assert calls["digests"] == 6


def test_what_was_removed_is_gone_at_once(store):
    read(store, 0, 1)
    rows = store.rows(KEYS[:2])
    store.remove([key(1)])
    for call in (lambda: read(store, 0, 1), lambda: store.describe(key(1))):
        with pytest.raises(EntryMissingError) as caught:
            call()
        assert caught.value.key == key(1)
    assert stack(KEYS[:2], rows)["moments"].equal(moments(0, 1)), "rows that were read stay valid"
    with pytest.raises(EntryMissingError):
        read(store, 1)
    assert read(store, 0).equal(moments(0))


@pytest.mark.parametrize("by", ["another store", "another process"])
@pytest.mark.parametrize("what", ["remove", "prune", "mark"])
def test_what_another_removed_is_gone_with_the_next_look_at_the_index(store, what, by):
    assert read(store, 0, 1).equal(moments(0, 1))

    def change():
        with DiskStore(store.path) as other:
            if what == "remove":
                other.remove([key(1)])
            elif what == "prune":
                prune(other, [key(number) for number in (0, 2, 3, 4, 5)])
            else:
                mark(other, 1)

    if by == "another store":
        change()
    else:
        assert run(change) == 0
    assert key(1) not in set(store.keys())
    with pytest.raises(EntryDamagedError if what == "mark" else EntryMissingError):
        read(store, 0, 1)
    assert read(store, 0, 2).equal(moments(0, 2))


def test_what_another_process_compacted_or_added_again_is_read_where_it_is_now(store):
    assert read(store, *range(6)).equal(moments(*range(6)))
    assert run(compact, store.path) == 0
    assert read(store, *range(6)).equal(moments(*range(6))), "what was read stays readable"
    assert list(store.keys()) and read(store, *range(6)).equal(moments(*range(6)))
    assert read(store, *range(6)).equal(moments(*range(6))) and not store.damaged()
    with DiskStore(store.path) as other:
        other.remove(KEYS[:2])
        other.add(samples(0, 1))
    assert set(store.keys()) == set(KEYS) and read(store, 0, 1).equal(moments(0, 1))


def test_what_is_new_is_verified_alone(store, calls):
    assert read(store, 0, 1).equal(moments(0, 1))
    with DiskStore(store.path) as other:
        other.add(samples(6, 7))
    store.add(samples(8))
    assert store.find([key(6), key(8)]) == {key(6), key(8)} and len(list(store.keys())) == 9
    calls["digests"] = 0
    assert read(store, 0, 1, 6).equal(moments(0, 1, 6)) and calls["digests"] == 1


@pytest.mark.parametrize("read_only", [False, True])
def test_what_was_found_damaged_is_not_read_again(store, read_only):
    with DiskStore(store.path, read_only=read_only) as reader:
        assert read(reader, 0, 1).equal(moments(0, 1))
        mark(reader, 0)  # the pack is in order again
        with pytest.raises(EntryDamagedError, match="digest"):
            read(reader, 0, 1)
        assert read(reader, 1).equal(moments(1))
    if not read_only:
        store.add(samples(0))
        assert len(packs(store)) == 4 and read(store, 0, 1).equal(moments(0, 1))


@pytest.mark.parametrize("writes", ["marked", "disk full"])
def test_what_was_found_damaged_after_it_was_read_is_not_returned_any_more(store, monkeypatch, writes):
    assert read(store, 0, 1).equal(moments(0, 1))
    flip(store, 0)
    if writes == "disk full":
        monkeypatch.setattr(Index, "transaction", lambda self: (_ for _ in ()).throw(StoreError("disk full")))
    assert set(verify(store).damaged) == {key(0)}
    for _ in range(2):
        with pytest.raises(EntryDamagedError):
            read(store, 0, 1)
    assert read(store, 1).equal(moments(1)) and read(store, 1).equal(moments(1))


def mapped_and_deleted(store):
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if str(store.path) in line and line.endswith("(deleted)")]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
def test_packs_that_were_compacted_away_are_released(store):
    assert read(store, *range(6)).equal(moments(*range(6)))
    compact(store)
    assert len(packs(store)) == 1 and not mapped_and_deleted(store)
    assert read(store, *range(6)).equal(moments(*range(6)))
    prune(store, [])
    assert not mapped_and_deleted(store)
    with pytest.raises(EntryMissingError):
        read(store, 0)


def test_bytes_that_are_released_are_verified_again(store, calls):
    read(store, 0, 1)
    store.release([pack_of(store, 0).stem])
    assert read(store, 0, 1).equal(moments(0, 1))
    assert calls["digests"] == 4


def test_a_fork_has_what_was_kept(store):
    read(store, 0, 1)

    def child():
        assert read(store, 0, 1).equal(moments(0, 1))
        store.remove([key(1)])
        with pytest.raises(EntryMissingError):
            read(store, 0, 1)

    assert run(child) == 0
    assert read(store, 0).equal(moments(0))


def test_a_closed_store_keeps_nothing(store):
    read(store, 0)
    store.close()
    for call in (lambda: read(store, 0), lambda: store.describe(key(0)), lambda: store.prefetch([key(0)])):
        with pytest.raises(StoreError, match="closed"):
            call()
    assert not Path("/proc/self/maps").exists() or str(store.path) not in Path("/proc/self/maps").read_text()


def test_threads_that_remove_and_read_never_see_what_is_gone(store):
    """One thread removes and adds again; no reader may be given what was gone before it asked, and still is."""
    stop, errors, gone = threading.Event(), [], [None]

    def look():
        while not stop.is_set():
            since = gone[0]
            try:
                read(store, 0, 5)
            except EntryMissingError:
                continue
            if since is not None and gone[0] is since:
                errors.append("an entry that was removed was given")

    threads = [threading.Thread(target=look) for _ in range(2)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for number in range(10):
            store.remove([key(5)])
            gone[0] = object()
            for _ in range(10):
                with pytest.raises(EntryMissingError):
                    read(store, 0, 5)
            gone[0] = None
            store.add(samples(5))
            assert read(store, 0, 5).equal(moments(0, 5)), number
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
        sys.setswitchinterval(switch)
    assert not errors


def test_bytes_that_were_mapped_meanwhile_are_verified_too(store, monkeypatch):
    """An entry is verified in one mapping of its pack; the next read is of another, of a copy that is damaged."""
    real = reader.verified_arrays

    def then_another_copy(data, name, location):
        found = real(data, name, location)
        monkeypatch.setattr(reader, "verified_arrays", real)
        store.release([location.pack.id])
        flip(store, 0)
        with pytest.raises(EntryDamagedError):
            store.rows([key(0)])
        return found

    monkeypatch.setattr(reader, "verified_arrays", then_another_copy)
    assert len(store.rows([key(0)])) == 1
    with pytest.raises(EntryDamagedError):
        read(store, 0)
