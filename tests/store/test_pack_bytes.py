"""A pack in memory is the pack on disk: the same bytes, and the same checks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import sample, samples

from latentcache.errors import PackError
from latentcache.store.entry import own_entry
from latentcache.store.pack import (
    WholePack,
    pack_buffers,
)

ENTRIES = [own_entry(entry) for entry in [*samples(0, 1, 2), sample(3, shape=(4, 8, 16), extra=torch.ones(3))]]


def packed(entries=ENTRIES):
    row, num_bytes, buffers = pack_buffers("1" * 32, entries)
    data = b"".join(buffers)
    assert len(data) == num_bytes == row.pack.file_bytes
    return row, data


PACKED = packed()[1]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_entries_come_back_from_memory(kind):
    data = kind(PACKED)
    whole = WholePack.in_memory("2" * 32, data)
    assert whole.row.pack.id == "2" * 32 and whole.row.names() == [entry.key for entry in ENTRIES]
    for at, entry in enumerate(ENTRIES):
        back = whole.copy(entry.key, whole.row.location(at))
        assert back.record == entry.record and back.digest() == entry.digest()
        assert all(torch.equal(back.tensors[name], tensor) for name, tensor in entry.tensors.items())


def verdict(read):
    try:
        whole = read()
        return whole.row.names(), bytes(whole.records), whole.row.digests.tobytes()
    except PackError as error:
        return str(error).partition(": ")[2]


@settings(max_examples=150, deadline=None)
@given(
    at=st.integers(0, len(PACKED) - 1), value=st.integers(0, 255), end=st.integers(0, len(PACKED)), cut=st.booleans()
)
def test_memory_and_file_get_the_same_verdict(tmp_path_factory, at, value, end, cut):
    data = PACKED[:end] if cut else PACKED[:at] + bytes([value]) + PACKED[at + 1 :]
    path = tmp_path_factory.getbasetemp() / f"{'4' * 32}.safetensors"
    path.write_bytes(data)
    in_memory = verdict(lambda: WholePack.in_memory("a pack", data))
    on_disk = verdict(lambda: WholePack.in_file(path))
    assert in_memory == on_disk
    assert data == PACKED or not cut or isinstance(in_memory, str)
