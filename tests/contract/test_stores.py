from __future__ import annotations

import json

import numpy as np
import pytest
from store_contract import RemovingStoreContract, assert_holds, make_entry, make_text

from latentcache.errors import EntryDamagedError
from latentcache.store import DiskStore, MemoryStore
from latentcache.store.batch import read_batch
from latentcache.store.upkeep import compact, verify

LENGTHS = [3, 1, 7, 3, 2]


def texts():
    """Entries with ragged fields, and one without."""
    return [*(make_text(number, length) for number, length in enumerate(LENGTHS)), make_entry(9)]


def write_offsets(store, change):
    """Change the offsets of the ragged field `hidden` in the only pack."""
    (path,) = store.path.glob("packs/*/*.safetensors")
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8:start])["hidden/offsets"]["data_offsets"]
    offsets = np.frombuffer(data[start + begin : start + end], "<i8").copy()
    assert offsets.tolist() == [0, *np.cumsum(LENGTHS)]
    change(offsets)
    with path.open("r+b") as file:
        file.seek(start + begin)
        file.write(offsets.tobytes())


class TestDiskStore(RemovingStoreContract):
    """And besides: damage to the offsets of ragged fields is found."""

    @pytest.fixture
    def store(self, tmp_path):
        with DiskStore(tmp_path / "cache") as store:
            yield store

    @pytest.mark.parametrize("value", [-1, 2, 1 << 40])
    def test_damaged_offsets_of_a_ragged_field_are_found(self, store, value):
        """An offset is the end of one entry and the start of the next: both are damaged, and no other is."""
        entries = texts()
        store.add(entries)
        write_offsets(store, lambda offsets: offsets.__setitem__(1, value))
        with DiskStore(store.path, read_only=True) as reader:
            assert verify(reader).damaged.keys() == {entry.record.key for entry in entries[:2]}
        for entry in entries[:2]:
            for call in (store.get, store.describe, lambda key: read_batch(store, [key])):
                with pytest.raises(EntryDamagedError):
                    call(entry.record.key)
        assert_holds(store, *entries[2:])
        assert store.damaged().keys() == {entry.record.key for entry in entries[:2]}
        assert compact(store).damaged == {} and store.add(entries) == 2
        assert_holds(store, *entries)

    @pytest.mark.parametrize("read_first", [False, True])
    def test_offsets_that_are_damaged_later_never_reach_outside(self, store, read_first):
        entries = texts()
        store.add(entries)
        if read_first:
            assert_holds(store, *entries)
        write_offsets(store, lambda offsets: offsets.fill(1 << 50))
        assert verify(store).damaged.keys() == {entry.record.key for entry in entries[:5]}
        for entry in entries[:5]:
            with pytest.raises(EntryDamagedError):
                store.rows([entry.record.key])
        assert_holds(store, entries[5])


class TestMemoryStore(RemovingStoreContract):
    @pytest.fixture
    def store(self):
        with MemoryStore() as store:
            yield store
