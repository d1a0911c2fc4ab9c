"""What was read once is not compared again, and what is not true any more is not returned."""


from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash
from store_samples import flip, key, sample, samples

from latentcache.errors import EntryDamagedError, EntryMissingError, StoreError
from latentcache.store import DiskStore, Index
from latentcache.store.batch import read_batch, stack
from latentcache.store.catalog import Catalog
from latentcache.store.upkeep import verify

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


def test_a_closed_store_keeps_nothing(store):
    read(store, 0)
    store.close()
    for call in (lambda: read(store, 0), lambda: store.describe(key(0)), lambda: store.prefetch([key(0)])):
        with pytest.raises(StoreError, match="closed"):
            call()
    assert not Path("/proc/self/maps").exists() or str(store.path) not in Path("/proc/self/maps").read_text()
