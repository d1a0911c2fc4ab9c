"""Entries leave a store as packs and come back, whole or not at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from store_samples import key, same, sample, samples

from latentcache.errors import (
    PackError,
    ReadOnlyError,
    StoreBusyError,
    StoreError,
)
from latentcache.identity import key_of
from latentcache.store import DiskStore
from latentcache.store.entry import own_entry
from latentcache.store.pack import new_pack_id, pack_buffers
from latentcache.store.upkeep import verify
from latentcache.types import Entry, Record


@pytest.fixture
def store(tmp_path):
    with DiskStore(tmp_path / "cache") as store:
        store.add([*samples(0, 1, 2), sample(3, shape=(2,), hidden=torch.ones(5, 3))])
        yield store


def packed(entries):
    row, num_bytes, buffers = pack_buffers(new_pack_id(), entries)
    data = b"".join(buffers)
    assert len(data) == num_bytes
    return row.pack.id, data


def test_another_pack_of_the_same_name_replaces_nothing(store):
    pack, data = packed([own_entry(sample(7))])
    _, other = packed([own_entry(sample(8))])
    assert store.take_pack(pack, [data[:7], data[7:]], len(data)) == 1
    assert store.take_pack(pack, [other], len(other)) == 0
    assert same(store.get(key(7)), sample(7)) and store.find([key(8)]) == set() and verify(store).ok
    assert not list((store.path / "packs").rglob("*.tmp"))


def test_values_that_entries_share_are_refused(store):
    """Reading all entries would take far longer than the pack's bytes say."""
    entries = []
    for number in range(40):
        identity = {"number": number}
        tensors = {"hidden": torch.full((1, 3), float(number))}
        record = Record(key_of(identity), "text", identity, {})
        entries.append(own_entry(Entry(record, tensors, frozenset({"hidden"}))))
    pack, data = packed(entries)
    offsets = np.arange(41).astype("<i8").tobytes()
    at = data.index(offsets)
    forged = data[:at] + np.array([0, 40] * 20 + [40], "<i8").tobytes() + data[at + len(offsets) :]
    with pytest.raises(PackError, match="share values"):
        store.take_pack(pack, [forged], len(forged))
    assert store.take_pack(pack, [data], len(data)) == 40


def test_a_pack_is_refused_while_upkeep_works_and_by_readers(store, tmp_path):
    pack, data = packed([own_entry(sample(7))])
    with DiskStore(store.path) as other, other.lock("compacting", shared=False), pytest.raises(StoreBusyError):
        store.take_pack(pack, [data], len(data))
    with DiskStore(store.path, read_only=True) as reader, pytest.raises(ReadOnlyError):
        reader.take_pack(pack, [data], len(data))
    assert not list((store.path / "packs").rglob(f"*{pack}*")) and store.find([key(7)]) == set()
    assert store.take_pack(pack, [data], len(data)) == 1


def test_a_pack_that_the_index_missed_is_taken_in(store, monkeypatch):
    pack, data = packed([own_entry(sample(8))])

    def fails(row):
        raise StoreError("the index cannot be written now")

    with monkeypatch.context() as patched, pytest.raises(StoreError, match="cannot be written now"):
        patched.setattr(store, "add_row", fails)
        store.take_pack(pack, [data], len(data))
    assert store.directory.pack_path(pack).stat().st_size == len(data) and store.find([key(8)]) == set()
    assert store.take_pack(pack, [data], len(data)) == 1 and store.find([key(8)]) == {key(8)}
    assert store.take_pack(pack, [data], len(data)) == 0
