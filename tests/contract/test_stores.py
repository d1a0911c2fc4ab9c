from __future__ import annotations

import json

import numpy as np
import pytest
from helpers.tensor_bits import read_batch
from store_contract import RemovingStoreContract, assert_holds, make_entry, make_text

from latentcache.errors import EntryDamagedError
from latentcache.store import DiskStore, MemoryStore
from latentcache.store.upkeep import compact, verify

LENGTHS = [3, 1, 7, 3, 2]


def texts():
    """Entries with ragged fields, and one without."""
    return [*(make_text(number, length) for number, length in enumerate(LENGTHS)), make_entry(9)]


def write_offset(store, value):
    """Change the end of the first entry in the ragged field `hidden` of the only pack."""
    (path,) = store.path.glob("packs/*/*.safetensors")
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    first = start + json.loads(data[8:start])["hidden/offsets"]["data_offsets"][0]
    offsets = np.frombuffer(data, "<i8", 1 + len(LENGTHS), first).copy()
    assert offsets.tolist() == [0, *np.cumsum(LENGTHS)]
    offsets[1] = value
    with path.open("r+b") as file:
        file.seek(first)
        file.write(offsets.tobytes())


class TestDiskStore(RemovingStoreContract):
    """And besides: damage to the offsets of ragged fields is found."""

    @pytest.fixture
    def store(self, tmp_path):
        with DiskStore(tmp_path / "cache") as store:
            yield store

    @pytest.mark.parametrize("value", [-1, 2, 1 << 50])
    @pytest.mark.parametrize("read_first", [False, True])
    def test_damaged_offsets_of_a_ragged_field_are_found(self, store, value, read_first):
        """An offset is the end of one entry and the start of the next: both are damaged, and no other is."""
        entries = texts()
        store.add(entries)
        if read_first:
            assert_holds(store, *entries)
        write_offset(store, value)
        with DiskStore(store.path, read_only=True) as reader:
            found = verify(store if read_first else reader)
        assert found.damaged.keys() == {entry.record.key for entry in entries[:2]}
        for entry in entries[:2]:
            for call in (store.get, store.describe, lambda key: read_batch(store, [key])):
                with pytest.raises(EntryDamagedError):
                    call(entry.record.key)
        assert_holds(store, *entries[2:])
        assert store.damaged().keys() == found.damaged.keys()
        assert compact(store).damaged == {} and store.add(entries) == 2
        assert_holds(store, *entries)


class TestMemoryStore(RemovingStoreContract):
    @pytest.fixture
    def store(self):
        with MemoryStore() as store:
            yield store
