from __future__ import annotations

import json
import os
import random
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from store_samples import bits, same, sample, samples

from latentcache.errors import EntryDamagedError, PackError, StoreError, UnsafeStoreError
from latentcache.identity import digest
from latentcache.store import DiskStore
from latentcache.store.pack import map_pack, new_pack_id, read_entry, read_header, write_pack
from latentcache.store.stacking import read_batch


@pytest.fixture
def path(tmp_path):
    return tmp_path / f"{new_pack_id()}.safetensors"


def raw_header(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), 8 + length


def rewrite_header(path, change):
    """Change the header as an attacker could: with consistent lengths."""
    data = path.read_bytes()
    header, start = raw_header(path)
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[start:])


def read_all(path):
    header = read_header(path)
    data = map_pack(path, header.size.file_bytes)
    return [read_entry(data, header.records[key], header.locations[key]) for key in header.locations]


def test_any_tool_reads_a_pack(path):
    entries = [*samples(0, 1, 2), sample(3, shape=(4, 8, 16))]
    write_pack(path, entries)
    with safe_open(path, framework="pt") as file:
        assert sorted(file.keys()) == ["moments/4x8x16", "moments/4x8x8"]
        assert file.metadata()["latentcache"] == "1"
    stacked = torch.stack([entry.tensors["moments"] for entry in entries[:3]])
    assert torch.equal(load_file(path)["moments/4x8x8"], stacked)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.bool])
def test_dtypes_without_a_numpy_equal(path, dtype):
    entries = [sample(number, shape=(3,), dtype=dtype) for number in range(3)]
    write_pack(path, entries)
    assert all(same(*pair) for pair in zip(read_all(path), entries, strict=True))


def test_every_column_starts_on_64_bytes_and_padding_is_rare(path):
    entries = [sample(n, odd=torch.ones(n % 3 + 1), even=torch.ones(16), scalar=torch.tensor(n)) for n in range(7)]
    write_pack(path, entries)
    header, start = raw_header(path)
    assert start % 64 == 0
    columns = {name: part["data_offsets"] for name, part in header.items() if name != "__metadata__"}
    assert all(begin % 64 == 0 for name, (begin, _) in columns.items() if not name.startswith("_padding/"))
    # Four columns do not end on 64 bytes; the last of them needs no padding.
    assert sorted(name for name in columns if name.startswith("_padding/")) == [f"_padding/{i}" for i in range(3)]
    assert all(same(*pair) for pair in zip(read_all(path), entries, strict=True))


def test_even_columns_need_no_padding(path):
    write_pack(path, samples(*range(5)))
    assert not [name for name in raw_header(path)[0] if name.startswith("_padding")]


def test_the_dtype_is_named_only_when_two_meet(path):
    write_pack(path, [sample(0), sample(1, dtype=torch.float32), sample(2, shape=(2,))])
    names = set(raw_header(path)[0]) - {"__metadata__"}
    assert {name for name in names if not name.startswith("_padding/")} == {
        "moments/4x8x8/float16",
        "moments/4x8x8/float32",
        "moments/2",
    }


def test_what_records_share_is_stored_once(path):
    write_pack(path, samples(*range(100)))
    assert path.read_bytes().count(b"a1b2c3" * 10) == 1
    assert raw_header(path)[1] / 100 < 500


def test_offsets_agree_with_the_file(path):
    entries = [sample(n, odd=torch.full((3,), float(n))) for n in range(4)]
    header, data = write_pack(path, entries), path.read_bytes()
    for entry in entries:
        for name, place in header.locations[entry.record.key].places.items():
            found = data[place.offset : place.offset + place.num_bytes]
            assert found == bits(entry.tensors[name]).numpy().tobytes()
    assert header == read_header(path) and header.size.file_bytes == len(data)


def change_records(header, change):
    metadata = header["__metadata__"]
    records = json.loads(metadata["records"])
    change(records)
    metadata["records"] = json.dumps(records)
    metadata["digest"] = digest(f"1\n{metadata['records']}".encode())


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["__metadata__"].update(latentcache="2"),
        lambda header: header["__metadata__"].pop("latentcache"),
        lambda header: header.pop("__metadata__"),
        lambda header: header["__metadata__"].update(records="[]"),
        lambda header: header["__metadata__"].update(
            records=header["__metadata__"]["records"].replace("photos/1", "x")
        ),
        lambda header: header.update({"moments/8x8x4": header.pop("moments/4x8x8")}),
        lambda header: header["moments/4x8x8"].update(dtype="BF16"),
        lambda header: header["moments/4x8x8"].update(shape=[3, 8, 4, 8]),
        lambda header: change_records(header, lambda r: r["records"][0]["identity"]["own"].update(number=77)),
        lambda header: change_records(header, lambda r: r["records"][0].update(rows=[[0, 3]])),
        lambda header: change_records(header, lambda r: r["records"][0].update(rows=[[-1, 0]])),
        lambda header: change_records(header, lambda r: r["records"][0].update(rows=[[0, 0], [0, 1]])),
        lambda header: change_records(header, lambda r: r["records"][0].update(rows=[])),
        lambda header: change_records(header, lambda r: r["records"][0].update(kind="sound")),
        lambda header: change_records(header, lambda r: r["records"].append(r["records"][0])),
        lambda header: change_records(header, lambda r: r["columns"][0].__setitem__(3, [4, 8, 1 << 70])),
        lambda header: change_records(header, lambda r: r["columns"][0].__setitem__(3, [4, 8, -8])),
        lambda header: change_records(header, lambda r: r["records"][0]["identity"].update(shared={"encoding": 99})),
        lambda header: change_records(header, lambda r: r.clear()),
        lambda header: header["__metadata__"].update(records="[" * 100_000),
    ],
    ids=lambda _: "",
)
def test_a_header_that_we_did_not_write_is_refused(path, change):
    write_pack(path, samples(0, 1, 2))
    rewrite_header(path, change)
    with pytest.raises(PackError) as caught:
        read_header(path)
    assert caught.value.path == str(path)


def test_every_truncation_and_extension_is_refused(path):
    write_pack(path, samples(0, 1, 2))
    data = path.read_bytes()
    for length in [*range(0, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(PackError):
            read_header(path)
        with pytest.raises(PackError, match="has"):
            map_pack(path, len(data))
    for more in (1, 63, 4096):
        path.write_bytes(data + bytes(more))
        with pytest.raises(PackError):
            read_header(path)


def test_random_bytes_are_refused(path):
    source = random.Random(0)
    for _ in range(200):
        path.write_bytes(source.randbytes(source.randrange(200)))
        with pytest.raises(PackError):
            read_header(path)


def test_only_regular_files_are_opened(path, tmp_path):
    write_pack(path, samples(0))
    link = tmp_path / f"{new_pack_id()}.safetensors"
    link.symlink_to(path)
    pipe = tmp_path / f"{new_pack_id()}.safetensors"
    os.mkfifo(pipe)
    for unsafe in (link, pipe, tmp_path):
        with pytest.raises(UnsafeStoreError):
            read_header(unsafe)
        with pytest.raises(UnsafeStoreError):
            map_pack(unsafe, 0)


def test_many_mapped_packs_cost_no_descriptors(tmp_path):
    entries = samples(*range(20))
    with DiskStore(tmp_path / "cache") as store:
        for entry in entries:
            store.add([entry])
        before = len(os.listdir("/dev/fd"))
        read_batch(store, [entry.record.key for entry in entries])
        assert len(store._mapped._maps) == 20
        assert len(os.listdir("/dev/fd")) == before


def test_bit_flips_are_refused_or_harmless(tmp_path):
    """1,000 flipped bits anywhere in a pack, read through the public API of a fresh store."""
    entries = [sample(n, shape=(4, 4), odd=torch.full((3,), float(n))) for n in range(6)]
    with DiskStore(tmp_path / "cache") as store:
        store.add(entries)
        (path,) = store.directory.packs.glob("*/*.safetensors")
    clean = path.read_bytes()
    places = random.Random(1).sample(range(len(clean) * 8), 1000)
    num_refused = 0
    for place in places:
        data = bytearray(clean)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        with DiskStore(tmp_path / "cache", read_only=True) as store:
            for entry in entries:
                try:
                    found = store.get(entry.record.key)
                except EntryDamagedError:
                    num_refused += 1
                else:
                    assert same(found, entry)
    path.write_bytes(clean)
    assert num_refused > 1000  # a flip in the header costs all its entries their records


def test_exchanged_rows_are_found(tmp_path):
    with DiskStore(tmp_path / "cache") as store:
        store.add(samples(0, 1))
        (path,) = store.directory.packs.glob("*/*.safetensors")
        first, second = (store.catalog.locate(sample(n).record.key).places["moments"] for n in (0, 1))
        data = bytearray(path.read_bytes())
        rows = [slice(place.offset, place.offset + place.num_bytes) for place in (first, second)]
        data[rows[0]], data[rows[1]] = data[rows[1]], data[rows[0]]
        path.write_bytes(data)
        for number in (0, 1):
            with pytest.raises(EntryDamagedError, match="digest"):
                store.get(sample(number).record.key)


def test_an_exchanged_pack_is_found(tmp_path):
    with DiskStore(tmp_path / "cache") as store:
        store.add(samples(0))
        store.add(samples(1))
        one, two = sorted(store.directory.packs.glob("*/*.safetensors"))
        one_bytes, two_bytes = one.read_bytes(), two.read_bytes()
        one.write_bytes(two_bytes)
        two.write_bytes(one_bytes)
        for number in (0, 1):
            with pytest.raises(StoreError):
                store.get(sample(number).record.key)
