"""What a store keeps of a batch for the next one: it saves look-ups and digests, and goes when it is not true."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from store_samples import key, packs, run, sample, samples

from latentcache.errors import EntryDamagedError, EntryMissingError, StoreError
from latentcache.store import DiskStore
from latentcache.store import mapped as mapped_module
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
    """Counts digests and look-ups."""
    counts = {"digests": 0, "look_ups": 0}
    check, look_up = mapped_module.check_payload, Catalog.look_up

    def counted_check(*args):
        counts["digests"] += 1
        return check(*args)

    def counted_look_up(self, keys):
        counts["look_ups"] += 1
        return look_up(self, keys)

    monkeypatch.setattr(mapped_module, "check_payload", counted_check)
    monkeypatch.setattr(Catalog, "look_up", counted_look_up)
    return counts


def test_a_batch_is_looked_up_at_once(store, calls):
    with DiskStore(store.path, read_ahead="never") as store:
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


def test_what_another_store_removed_is_gone_with_the_next_look_at_the_index(store):
    read(store, 0, 1)
    with DiskStore(store.path) as other:
        other.remove([key(1)])
    assert key(1) not in set(store.keys())
    with pytest.raises(EntryMissingError):
        read(store, 0, 1)


def test_what_was_found_damaged_is_not_read_again(store):
    read(store, 0, 1)
    location = store.catalog.locate(key(0))
    store.mark_damaged({key(0): (location, "a test says so")})
    with pytest.raises(EntryDamagedError, match="a test says so"):
        read(store, 0, 1)
    store.add(samples(0))
    assert store.catalog.locate(key(0)) != location and read(store, 0, 1).equal(moments(0, 1))


@pytest.mark.parametrize("writes", ["marked", "disk full"])
def test_what_was_found_damaged_after_it_was_read_is_handed_out_no_more(store, monkeypatch, writes):
    generation = store.generation
    assert read(store, 0, 1).equal(moments(0, 1))
    location = store.catalog.locate(key(0))
    with store.directory.pack_path(location.pack).open("r+b") as file:
        file.seek(location.offsets[0])
        file.write(b"\xff" * 32)
    if writes == "disk full":
        monkeypatch.setattr(store.catalog, "mark", lambda damaged: (_ for _ in ()).throw(StoreError("disk full")))
    assert set(verify(store).damaged) == {key(0)}
    assert store.generation != generation
    for _ in range(2):
        with pytest.raises(EntryDamagedError):
            read(store, 0, 1)
    assert read(store, 1).equal(moments(1))


def mapped_and_deleted(store):
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if str(store.path) in line and line.endswith("(deleted)")]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
def test_packs_that_were_compacted_away_are_let_go(store):
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
    generation = store.generation
    store.release([store.catalog.locate(key(0)).pack])
    assert store.generation != generation
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
