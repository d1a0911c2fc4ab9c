"""Entries leave a store as packs and come back, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from store_samples import flip, key, same, sample, samples

from latentcache.errors import (
    EntryDamagedError,
    EntryMissingError,
    PackError,
    ReadOnlyError,
    StoreBusyError,
    StoreError,
)
from latentcache.store import DiskStore
from latentcache.store.base import own_entry
from latentcache.store.exchange import StoredEntries, take_pack, take_sealed
from latentcache.store.pack import new_pack_id, pack_buffers
from latentcache.store.upkeep import compact, verify


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


def mapped_packs():
    lines = Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines()
    return {line.partition("/packs/")[2] for line in lines if "/packs/" in line}


def test_entries_go_from_store_to_store(store, tmp_path):
    entries = StoredEntries(store).read([key(2), key(0), key(3)])
    owned = [own_entry(sample(number)) for number in (2, 0)]
    assert [(e.key, e.record, e.digest(), e.spec()) for e in entries[:2]] == [
        (e.key, e.record, e.digest(), e.spec()) for e in owned
    ]
    pack, data = packed(entries)
    with DiskStore(tmp_path / "other") as other:
        other.add(samples(0))
        assert take_pack(other, pack, [data[:7], data[7:]], len(data)) == 2
        assert other.find([key(n) for n in range(4)]) == {key(0), key(2), key(3)}
        for number in (0, 2):
            assert same(other.get(key(number)), sample(number))
        assert other.get(key(3)).tensors["hidden"].shape == (5, 3)
        assert not verify(other).damaged


def test_records_are_read_from_mapped_packs(store, monkeypatch):
    """The store's own way parses each of them: it took six times as long as all else."""
    monkeypatch.setattr(DiskStore, "record", lambda self, key: pytest.fail("a record was read by itself"))
    for found, number in zip(StoredEntries(store).read([key(2), key(0)]), (2, 0), strict=True):
        assert found.record == own_entry(sample(number)).record


def test_a_missing_or_damaged_entry_is_an_error(store):
    entries = StoredEntries(store)
    with pytest.raises(EntryMissingError):
        entries.read([key(0), key(9)])
    flip(store, 1)
    with pytest.raises(EntryDamagedError):
        entries.read([key(1)])
    assert [entry.key for entry in entries.read([key(0), key(2)])] == [key(0), key(2)]


def test_damaged_records_do_not_leave(store):
    [path] = store.directory.packs.glob("*/*.safetensors")
    data = bytearray(path.read_bytes())
    at = data.index(b"photos/2.jpg")
    path.write_bytes(data[:at] + b"q" + data[at + 1 :])
    with pytest.raises(EntryDamagedError, match="records"):
        StoredEntries(store).read([key(2)])


def test_a_pack_is_refused_while_upkeep_works_and_by_readers(store, tmp_path):
    pack, data = packed([own_entry(sample(7))])
    with DiskStore(store.path) as other, other.lock("compacting", shared=False), pytest.raises(StoreBusyError):
        take_pack(store, pack, [data], len(data))
    with DiskStore(store.path, read_only=True) as reader, pytest.raises(ReadOnlyError):
        take_pack(reader, pack, [data], len(data))
    with pytest.raises(PackError, match="digest"):
        take_pack(store, pack, [data[:-1] + bytes([data[-1] ^ 1])], len(data))

    def interrupted():
        yield data[:100]
        raise RuntimeError("the client is gone")

    with pytest.raises(RuntimeError):
        take_pack(store, pack, interrupted(), len(data))
    assert not list((store.path / "packs").rglob(f"*{pack}*")) and store.find([key(7)]) == set()
    assert take_pack(store, pack, [data], len(data)) == 1


def test_a_pack_that_the_index_missed_is_taken_in(store, monkeypatch):
    pack, data = packed([own_entry(sample(8))])

    def fails(row):
        raise StoreError("the index cannot be written now")

    with monkeypatch.context() as patched, pytest.raises(StoreError, match="cannot be written now"):
        patched.setattr(store.catalog, "seal", fails)
        take_pack(store, pack, [data], len(data))
    assert store.directory.pack_size(pack) == len(data) and store.find([key(8)]) == set()
    assert take_sealed(store, pack) == 1 and store.find([key(8)]) == {key(8)}
    assert take_sealed(store, pack) == 0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says what is mapped")
def test_packs_that_another_process_removed_are_released(store):
    entries = StoredEntries(store)
    entries.release()
    held = entries.read([key(0)])
    [name] = [path.name for path in store.directory.packs.glob("*/*.safetensors")]
    assert any(name in each for each in mapped_packs())
    with DiskStore(store.path) as other:
        other.add(samples(5))
        other.remove([key(1), key(2), key(3)])
    compact(store.path)
    assert entries.release() == {name.partition(".")[0]}
    values = np.array(held[0].tensors["moments"])  # what was read stays
    assert np.array_equal(values, sample(0).tensors["moments"].numpy())
    del held
    assert not any(name in each for each in mapped_packs())
    assert [entry.key for entry in entries.read([key(0), key(5)])] == [key(0), key(5)]
