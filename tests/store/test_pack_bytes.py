"""A pack in memory is the pack on disk: the same bytes, and the same checks."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import sample, samples

from latentcache.errors import PackError
from latentcache.store.base import own_entry
from latentcache.store.pack import (
    WholePack,
    new_pack_id,
    pack_buffers,
    read_pack_bytes,
    read_records,
    write_pack,
)

ENTRIES = [own_entry(entry) for entry in [*samples(0, 1, 2), sample(3, shape=(4, 8, 16), extra=torch.ones(3))]]


def packed(entries=ENTRIES):
    row, num_bytes, buffers = pack_buffers("1" * 32, entries)
    data = b"".join(buffers)
    assert len(data) == num_bytes == row.pack.file_bytes
    return row, data


PACKED = packed()[1]


def test_the_bytes_are_those_of_the_file(tmp_path):
    path = tmp_path / f"{new_pack_id()}.safetensors"
    on_disk, (in_memory, data) = write_pack(path, ENTRIES), packed()
    assert path.read_bytes() == data
    assert on_disk.pack.groups == in_memory.pack.groups and on_disk.names() == in_memory.names()
    assert (on_disk.digests == in_memory.digests).all() and in_memory.pack.id == "1" * 32


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_entries_come_back_from_memory(kind):
    data = kind(PACKED)
    whole = WholePack.in_memory("2" * 32, data)
    assert whole.row.pack.id == "2" * 32 and whole.row.names() == [entry.key for entry in ENTRIES]
    for at, entry in enumerate(ENTRIES):
        back = whole.copy(entry.key, whole.row.location(at))
        assert back.record == entry.record and back.digest() == entry.digest()
        assert all(torch.equal(back.tensors[name], tensor) for name, tensor in entry.tensors.items())


def test_a_file_that_has_no_name_yet_is_checked_by_its_descriptor(tmp_path):
    (tmp_path / "half.tmp").write_bytes(PACKED)
    fd = os.open(tmp_path / "half.tmp", os.O_RDONLY)
    row = WholePack.in_open_file(tmp_path / f"{'3' * 32}.safetensors", fd).row
    os.close(fd)
    assert row.pack.id == "3" * 32 and row.names() == [entry.key for entry in ENTRIES]


def verdict(read):
    try:
        records = read()
        return records.row.names(), records.data, records.row.digests.tobytes()
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
    in_memory = verdict(lambda: read_pack_bytes(data, "a pack"))
    on_disk = verdict(lambda: read_records(path))
    assert in_memory == on_disk
    assert data == PACKED or not cut or isinstance(in_memory, str)


def test_errors_have_the_given_name():
    with pytest.raises(PackError, match="http://host/v1/packs/7: ends after 3 bytes, where 8 are needed"):
        read_pack_bytes(b"abc", "http://host/v1/packs/7")
    with pytest.raises(PackError, match="its header has"):
        read_pack_bytes(b"\xff" * 64, "pack 7")


def test_no_descriptor_is_left():
    num = len(os.listdir("/dev/fd"))
    for end in (len(PACKED), 100, len(PACKED) - 1):
        verdict(lambda end=end: read_pack_bytes(PACKED[:end], "a pack"))
    assert len(os.listdir("/dev/fd")) == num
