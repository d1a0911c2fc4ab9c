"""Entries leave a store as packs and come back, whole or not at all."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from store_samples import key, same, sample, samples

from latentcache.errors import (
    ReadOnlyError,
    StoreBusyError,
    StoreError,
)
from latentcache.store import DiskStore
from latentcache.store.entry import own_entry
from latentcache.store.pack import new_pack_id, pack_buffers
from latentcache.store.upkeep import verify


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
    with monkeypatch.context() as patched, pytest.raises(StoreError, match="no space"):
        patched.setattr(store, "add_row", Mock(side_effect=StoreError("no space")))
        store.take_pack(pack, [data], len(data))
    assert store.directory.pack_path(pack).stat().st_size == len(data) and store.find([key(8)]) == set()
    assert store.take_pack(pack, [data], len(data)) == 1 and store.find([key(8)]) == {key(8)}
