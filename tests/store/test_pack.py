"""Packs: any tool opens them, their header stays small, and no changed byte becomes a wrong value."""

from __future__ import annotations

import json
import os
import struct

import pytest
import torch
from helpers.tensor_bits import bits, read_batch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from store_samples import packs, same, sample, samples, text

from latentcache.errors import PackError
from latentcache.identity import digest, key_of
from latentcache.store import DiskStore
from latentcache.store.batch import own_tensors
from latentcache.store.entry import own_entry
from latentcache.store.layout import PackRow
from latentcache.store.pack import WholePack, map_pack, new_pack_id, read_row, write_pack
from latentcache.types import Entry, Record


@pytest.fixture
def path(tmp_path):
    return tmp_path / f"{new_pack_id()}.safetensors"


def write(path, entries):
    return write_pack(path, [own_entry(entry) for entry in entries])


def raw_header(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), 8 + length


def tensor_bytes(path, name):
    header, start = raw_header(path)
    begin, end = header[name]["data_offsets"]
    return start + begin, start + end


def read_at(whole, key, location):
    """The entry, or why it cannot be read, by the checks of a store, `verify` and `rebuild`."""
    if (problem := whole.problem(key, location)) is not None:
        return problem
    owned = whole.entry(key, location)
    return own_tensors(whole.record(location.row), owned.values, owned.ragged)


def read_all(whole):
    """All entries of a pack, by key."""
    return {key: read_at(whole, key, whole.row.location(at)) for at, key in enumerate(whole.row.names())}


# The format ----------------------------------------------------------------------------------------------------------


def test_any_tool_reads_a_pack(path):
    entries = [*samples(0, 1, 2), sample(3, shape=(4, 8, 16)), text(4, 2), text(5, 3)]
    write(path, entries)
    with safe_open(path, framework="pt") as file:
        names = [name for name in sorted(file.keys()) if not name.startswith(("_index", "_padding"))]
        ragged = ["hidden/offsets", "hidden/values", "mask/offsets", "mask/values"]
        assert names == [*ragged, "moments/4x8x16", "moments/4x8x8", "moments/7"]
        assert file.metadata()["latentcache"] == "2"
    header, start = raw_header(path)
    parts = [part["data_offsets"][0] for name, part in header.items() if not name.startswith("_")]
    assert start % 64 == 0 and not any(begin % 64 for begin in parts), "unaligned copies are slow"
    found = load_file(path)
    assert torch.equal(found["moments/4x8x8"], torch.stack([entry.tensors["moments"] for entry in entries[:3]]))
    assert bits(found["hidden/values"]).equal(bits(torch.cat([entry.tensors["hidden"] for entry in entries[4:]])))
    assert found["hidden/offsets"].tolist() == [0, 2, 5]
    assert found["_index/keys"].numpy().tobytes().hex() == "".join(entry.record.key for entry in entries)
    assert found["_index/digests"].shape == (6, 16)
    offsets, records = found["_index/record_offsets"].tolist(), found["_index/records"].numpy().tobytes()
    for entry, start, end in zip(entries, offsets[:-1], offsets[1:], strict=True):
        assert json.loads(records[start:end]) == {
            "identity": entry.record.identity,
            "provenance": entry.record.provenance,
        }


@pytest.mark.parametrize("num", [1, 8192])
def test_the_header_stays_small(path, num):
    entries = [Entry(Record(key_of(i := {"n": n}), "text", i, {}), {"x": torch.full((1,), n)}) for n in range(num)]
    head = write(path, entries)
    assert raw_header(path)[1] < 16 << 10
    found = read_row(path)
    assert found.names() == [entry.record.key for entry in entries] == head.names()
    last = WholePack.in_file(path).record(num - 1)
    assert last == entries[-1].record


def test_a_row_of_the_index_is_read_back_and_a_flip_of_any_byte_is_refused(path):
    row = write(path, samples(0, 1, 2))
    row.live[1], row.reasons = False, {1: "a reason \u2026"}
    data = row.to_bytes()
    found = PackRow.from_bytes(row.pack.id, data)
    assert found.pack == row.pack and found.names() == row.names() and found.live.tolist() == [True, False, True]
    assert found.digests.tolist() == row.digests.tolist() and found.damaged() == {row.key(1): "a reason \u2026"}
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        for damaged in (changed, data[:at]):
            with pytest.raises(ValueError, match="checksum"):
                PackRow.from_bytes(row.pack.id, damaged)


# Packs that nobody should have made ----------------------------------------------------------------------------------


def rewrite_header(path, change):
    """Change the header as an attacker could: with lengths and digests that fit."""
    data = path.read_bytes()
    header, start = raw_header(path)
    index = b"".join(data[slice(*tensor_bytes(path, f"_index/{name}"))] for name in ("keys", "digests"))
    before = header["__metadata__"]["groups"]
    change(header)
    metadata = header.get("__metadata__", {})
    if metadata.get("groups", before) != before:
        metadata["index_digest"] = digest(f"2\n{metadata['groups']}\n".encode() + index)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[start:])


def in_groups(old, new):
    def change(header):
        assert old in header["__metadata__"]["groups"]
        header["__metadata__"]["groups"] = header["__metadata__"]["groups"].replace(old, new)

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["__metadata__"].pop("groups"),
        lambda header: header["__metadata__"].update(index_digest="0" * 64),
        lambda header: header.update({"moments/8x8x4": header.pop("moments/4x8x8")}),
        lambda header: header["moments/4x8x8"].update(shape=[4, 3, 8, 8]),
        lambda header: header["_index/keys"].update(dtype="I8"),
        lambda header: header["moments/4x8x8"].update(shape=[-3, 4, -8, 8]),
        lambda header: header["moments/4x8x8"].update(shape=[10**4000, 10**4000]),
        lambda header: header.update(hole={"dtype": "U8", "shape": [4], "data_offsets": [1 << 40, (1 << 40) + 4]}),
        lambda header: header.update(another=header["moments/4x8x8"]),
        lambda header: header["hidden/offsets"].update(shape=[1, 3]),
        in_groups('"image",3', '"image",5'),
        in_groups('"image"', "[5]"),
        in_groups('"image"', '"No kind!"'),
        in_groups('["hidden"', '[["hidden"]'),
        in_groups('["hidden"', '["a/b"'),
        in_groups('["hidden"', '["moments"'),
        lambda header: header["__metadata__"].update(groups="[" * 100_000),
    ],
    ids=lambda _: "",
)
def test_a_header_that_we_did_not_write_is_refused(path, change):
    write(path, [*samples(0, 1, 2), text(3, 2), text(4, 1)])
    rewrite_header(path, lambda header: None)
    assert read_row(path).pack.num_entries == 5
    rewrite_header(path, change)
    for read in (read_row, WholePack.in_file):
        with pytest.raises(PackError) as caught:
            read(path)
        assert caught.value.path == str(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"latentcache": "1"}, r"pack format '1', this version reads '2'\. Run precache again"),
        (None, "pack format None"),
        ({"latentcache": "2", "groups": " " * (1 << 20)}, r"its header has 1,0.* at most 1,048,576 are allowed"),
    ],
)
def test_another_format_and_an_oversized_header_are_refused(path, metadata, message):
    save_file({"moments/4": torch.ones(2, 4)}, path, metadata=metadata)
    with pytest.raises(PackError, match=message):
        read_row(path)


def test_every_truncation_and_extension_is_refused(path):
    write(path, [*samples(0, 1), text(2, 3)])
    data = path.read_bytes()
    for length in [*range(0, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(PackError):
            read_row(path)
        with pytest.raises(PackError, match="has"):
            map_pack(path, len(data))
    path.write_bytes(data + bytes(1))
    with pytest.raises(PackError):
        read_row(path)


# Damage --------------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_of_any_byte_is_refused_or_harmless(path):
    """In the header and in each tensor. An entry is read where the index says, and where the pack itself says."""
    entries = [text(0, 2), text(1, 1)]
    head = write(path, entries)
    places = {key: head.location(row) for row, key in enumerate(head.names())}
    expected = {entry.record.key: entry for entry in entries}
    clean, (_, start) = path.read_bytes(), raw_header(path)
    padding = {
        at for name in raw_header(path)[0] if name.startswith("_padding") for at in range(*tensor_bytes(path, name))
    }
    with path.open("r+b") as file:
        for at in range(len(clean)):  # one of the bits of each byte
            os.pwrite(file.fileno(), bytes([clean[at] ^ 1 << at % 8]), at)
            try:
                whole = WholePack.in_file(path)
            except PackError:
                found = None
            else:
                found = {key: read_at(whole, key, place) for key, place in places.items()}
                for key, entry in [*found.items(), *read_all(whole).items()]:
                    assert isinstance(entry, str) or same(entry, expected[key])
            if at >= start and at not in padding:
                assert found is None or any(isinstance(each, str) for each in found.values()), f"byte {at} is unnoticed"
            os.pwrite(file.fileno(), clean[at : at + 1], at)
    for key, entry in read_all(WholePack.in_file(path)).items():
        assert same(entry, expected.pop(key))
    assert not expected


def test_many_mapped_packs_cost_no_descriptors(tmp_path):
    entries = samples(*range(20))
    with DiskStore(tmp_path / "cache") as store:
        for entry in entries:
            store.add([entry])
        before = len(os.listdir("/dev/fd"))
        batch = read_batch(store, [entry.record.key for entry in entries])
        assert len(batch["moments"]) == 20 and len(packs(store)) == 20
        assert len(os.listdir("/dev/fd")) == before
