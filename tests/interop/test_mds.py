"""MDS: shards that are written here byte by byte, as MosaicML's writer does it, and an index that lies."""

from __future__ import annotations

import hashlib
import json
import math
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.foreign_files import damaged, items_quietly, split
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shard_samples import cache_of, declared, items

from latentcache.errors import DatasetError, ForeignFileRefused
from latentcache.interop.formats import mds
from latentcache.types import Refusal

# The columns of mosaicml/diffusion's precompute_latents.py, but for those that no training reads.
COLUMNS = {
    "caption": "str",
    "caption_latents": "bytes",
    "height": "int32",
    "key": "str",
    "latents_256": "bytes",
    "original_height": "int32",
    "original_width": "int32",
    "width": "int32",
}
SIZES = {"int32": 4, "int": 8}
LATENTS = np.random.default_rng(0).standard_normal((4, 32, 32)).astype(np.float16)
SAMPLE = {
    "caption": "a cät".encode(),
    "caption_latents": b"\0" * 154,
    "height": struct.pack("<i", 300),
    "key": b"000017",
    "latents_256": LATENTS.tobytes(),
    "original_height": struct.pack("<i", 600),
    "original_width": struct.pack("<i", 620),
    "width": struct.pack("<i", 310),
}
FIELDS = {
    "latents": "latents_256",
    "sample_id": "key",
    "caption": "caption",
    "original_size": ["original_height", "original_width"],
}
RAW = {"latents_256": {"dtype": "float16", "shape": [4, 32, 32]}}


def sample_bytes(sample: dict[str, bytes], columns: dict[str, str]) -> bytes:
    sizes = [len(sample[name]) for name in sorted(columns) if columns[name] not in SIZES]
    return struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(sample[name] for name in sorted(columns))


def write_mds(
    folder: Path,
    samples: list[dict[str, bytes]],
    columns: dict[str, str] = COLUMNS,
    change: Callable[[dict[str, Any]], None] = lambda _: None,
) -> Path:
    """A folder with one shard; `change` changes the shard's item of the index."""
    names = sorted(columns)
    head = json.dumps({"version": 2, "format": "mds"}).encode()
    parts = [sample_bytes(sample, columns) for sample in samples]
    start = 4 * (len(parts) + 2) + len(head)
    offsets = [start + sum(map(len, parts[:number])) for number in range(len(parts) + 1)]
    data = struct.pack(f"<{1 + len(offsets)}I", len(parts), *offsets) + head + b"".join(parts)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shard.00000.mds").write_bytes(data)
    item = {
        "column_encodings": [columns[name] for name in names],
        "column_names": names,
        "column_sizes": [SIZES.get(columns[name]) for name in names],
        "compression": None,
        "format": "mds",
        "hashes": ["sha1", "xxh64"],
        "raw_data": {
            "basename": "shard.00000.mds",
            "bytes": len(data),
            "hashes": {"sha1": hashlib.sha1(data).hexdigest(), "xxh64": "0"},
        },
        "samples": len(parts),
        "size_limit": 67108864,
        "version": 2,
        "zip_data": None,
    }
    change(item)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [item]}))
    return folder


def opened(folder: Path, **changes: Any) -> mds.MdsCache:
    return mds.read(folder, declaration=declared(folder, **({"fields": FIELDS, "raw": RAW} | changes)))


def test_columns_as_mosaicml_diffusion_writes_them(tmp_path: Path) -> None:
    small = SAMPLE | {"latents_256": b"", "key": b"000018"}  # the image was smaller
    folder = write_mds(tmp_path / "mds", [SAMPLE, small])
    (found,), texts, (refusal,) = split(opened(folder, scaling_factor=0.18215))
    assert torch.equal(found.latents, torch.from_numpy(LATENTS)) and found.is_scaled
    assert (found.sample_id, found.geometry.original_size, found.geometry.target_size) == (
        "000017",
        (600, 620),
        (256, 256),
    )
    assert texts == [] and (refusal.reason, refusal.detail) == ("missing", "it has no latents_256")


ARRAY = np.arange(1, 1 + 4 * 8 * 16, dtype=np.float32).reshape(4, 8, 16)
HALF = ARRAY.astype(np.float16)


@pytest.mark.parametrize(
    ("encoding", "data", "expected"),
    [
        ("ndarray", b"\x22\x0c\x04\x08\x10" + ARRAY.tobytes(), ARRAY),
        ("ndarray", b"\x12\x0d" + np.array([4, 8, 16], "<u2").tobytes() + HALF.tobytes(), HALF),
        ("ndarray:float16", b"\x0f" + np.array([4, 8, 16], "<u8").tobytes() + HALF.tobytes(), HALF),
        ("ndarray:float32:4,8,16", ARRAY.tobytes(), ARRAY),
    ],
    ids=["bytes", "shorts", "longs", "fixed"],
)
def test_arrays_of_all_four_forms_are_read(tmp_path: Path, encoding: str, data: bytes, expected: np.ndarray) -> None:
    folder = write_mds(tmp_path / "mds", [{"latents": data}], {"latents": encoding})
    (found,), _, refusals = split(opened(folder, fields={"latents": "latents"}))
    assert torch.equal(found.latents, torch.from_numpy(expected)) and refusals == []
    assert found.sample_id == "shard.00000.mds/0"


@pytest.mark.parametrize(
    ("encoding", "data", "words"),
    [
        ("ndarray", b"\x22\x0c\xff\xff\xff" + ARRAY.tobytes(), "and is float32 [255, 255, 255]"),
        ("ndarray", b"\x22\x0c\x04", "has 0 bytes"),
        ("ndarray", b"\x21\x0c\x04\x08\x10" + ARRAY.tobytes(), "is no array: KeyError(33)"),
        ("ndarray", b"\x22", "is no array: IndexError"),
        ("ndarray:float99", b"\x0c", "is no array: ValueError"),
        ("ndarray:float16:4,x", b"\x0c", "is no array: ValueError"),
        ("ndarray:float16:4,-8,16", b"\x0c", "a side of -8"),
        ("ndarray:float16:4,-2,-2", bytes(32), "a side of -2"),
        ("ndarray:float16:" + ",".join("1" * 100), bytes(2), "100 sides"),
        ("ndarray", b"\x12\xfc" + b"\1" * 63 + bytes(2), "63 sides"),
        ("bytes", ARRAY.tobytes(), "encoded as bytes: a tensor is an ndarray, or bytes that are declared"),
        ("jpeg", b"\xff\xd8", "encoded as jpeg"),
    ],
    ids=[
        *("too-large", "cut", "int32", "one-byte", "float99", "side", "negative"),
        *("two-negative", "sides", "header-sides", "bytes", "jpeg"),
    ],
)
def test_arrays_that_lie_are_refused(tmp_path: Path, encoding: str, data: bytes, words: str) -> None:
    folder = write_mds(tmp_path / "mds", [{"latents": data}], {"latents": encoding})
    _, _, (refusal,) = split(opened(folder, fields={"latents": "latents"}))
    assert refusal.reason in ("corrupt", "unsupported-format") and words in refusal.detail


def test_a_column_that_would_be_unpickled_is_refused_by_name(tmp_path: Path) -> None:
    columns = COLUMNS | {"latents_256": "pkl"}
    (refusal,) = opened(write_mds(tmp_path / "mds", [SAMPLE], columns)).items()
    assert (refusal.reason, refusal.path.rpartition("/")[2]) == ("unsupported-format", "shard.00000.mds")
    assert "column latents_256 is encoded as pkl: reading it would run code" in refusal.detail
    # Nobody reads the others.
    columns = COLUMNS | {"caption_latents": "pkl"}
    assert len(split(opened(write_mds(tmp_path / "other", [SAMPLE], columns)))[0]) == 1


def _raw(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda item: item["raw_data"].update(changes)


def _file(num_bytes: int) -> dict[str, Any]:
    return {"basename": "shard.00000.mds", "bytes": num_bytes, "hashes": {}}


def _item(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda item: item.update(changes)


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        (_item(compression="zstd:3"), "unsupported-format", "compressed with zstd:3"),
        (_item(samples=2), "corrupt", "not the 2 samples"),
        (_item(samples=1 << 29), "corrupt", "not the 536,870,912 samples"),
        (_raw(bytes=1 << 31), "truncated", "the index says 2,147,483,648"),
        (_raw(bytes=9), "corrupt", "the index says 9"),
        (_raw(basename="../mds/shard.00000.mds"), "corrupt", "no path of a file"),
        (_raw(basename="nonsense.mds"), "missing", "no such file"),
        (_raw(hashes={"sha1": "0" * 40}), "corrupt", "its sha1 is"),
        (_item(column_sizes=[None] * 8), "corrupt", "do not fill its"),
        (_item(column_sizes=[1 << 31] * 8), "corrupt", "each sample needs 17,179,869,184 bytes at least"),
        (_item(column_names=["caption"] * 8), "corrupt", "two of its columns have one name"),
        (_item(column_names=[f"c{number}" for number in range(8)]), "missing", "no column latents_256; it has c0"),
    ],
    ids=[
        *("zstd", "samples", "many-samples", "longer", "shorter", "upwards", "nowhere", "sha1"),
        *("no-sizes", "large-sizes", "one-name", "other-names"),
    ],
)
def test_an_index_that_lies_refuses_the_shard(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], reason: str, words: str
) -> None:
    found, texts, (refusal,) = split(opened(write_mds(tmp_path / "mds", [SAMPLE], change=change)))
    assert found == [] == texts and refusal.reason == reason and words in refusal.detail


@pytest.mark.parametrize(
    ("number", "offset"), [(0, 8), (1, 0xFFFFFFFF), (1, 0), (2, 0xFFFFFFFF)], ids=["table", "beyond", "back", "end"]
)
def test_offsets_that_lie_refuse_the_shard(tmp_path: Path, number: int, offset: int) -> None:
    folder = write_mds(tmp_path / "mds", [SAMPLE, SAMPLE | {"key": b"2"}], change=_raw(hashes={}))
    path = folder / "shard.00000.mds"
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 4 * (1 + number), offset)
    path.write_bytes(data)
    found, _, (refusal,) = split(opened(folder))
    assert found == [] and (refusal.sample_id, refusal.reason) == ("shard.00000.mds", "corrupt")
    assert "the offsets of its samples" in refusal.detail


def test_a_shard_of_samples_without_bytes_is_one_refusal(tmp_path: Path) -> None:
    count = 50_000
    data = struct.pack("<I", count) + struct.pack("<I", 4 * (count + 2)) * (count + 1)
    folder = write_mds(tmp_path / "mds", [], change=lambda item: item.update(samples=count, raw_data=_file(len(data))))
    (folder / "shard.00000.mds").write_bytes(data)
    assert [type(item) for item in items_quietly(opened(folder))] == [Refusal]


def test_a_sparse_shard_of_very_many_samples_takes_no_memory(tmp_path: Path) -> None:
    folder = write_mds(
        tmp_path / "mds", [], change=lambda item: item.update(samples=1 << 28, raw_data=_file((1 << 32) - 1))
    )
    with (folder / "shard.00000.mds").open("wb") as file:
        file.write(struct.pack("<I", 1 << 28))
        file.truncate((1 << 32) - 1)
    (refusal,) = items_quietly(opened(folder))
    assert isinstance(refusal, Refusal) and "268,435,456 samples; 1,048,576 are allowed" in refusal.detail


def test_a_shard_without_samples_is_read(tmp_path: Path) -> None:
    assert items_quietly(opened(write_mds(tmp_path / "mds", []))) == []


@pytest.mark.parametrize("other", ["shard.00000.mds", "./shard.00000.mds", "/shard.00000.mds"])
def test_an_index_that_lists_a_shard_twice_is_refused(tmp_path: Path, other: str) -> None:
    folder = write_mds(tmp_path / "mds", [SAMPLE])
    index = json.loads((folder / "index.json").read_text())
    index["shards"] += [index["shards"][0] | {"raw_data": index["shards"][0]["raw_data"] | {"basename": other}}]
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DatasetError, match=r"lists the shard 'shard\.00000\.mds' twice"):
        opened(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON document"),
        ("[" * 100_000, "is no JSON document"),
        ("[]", "is no index"),
        ('{"version": 1, "shards": []}', "version"),
        ('{"version": 2, "shards": [{}]}', "shards.0.format"),
    ],
    ids=["cut", "nested", "list", "version", "shard"],
)
def test_an_index_that_cannot_be_used_is_named(tmp_path: Path, text: str, words: str) -> None:
    folder = write_mds(tmp_path / "mds", [SAMPLE])
    (folder / "index.json").write_text(text)
    with pytest.raises(DatasetError, match=words) as caught:
        opened(folder)
    assert caught.value.path == str(folder / "index.json")
    (folder / "index.json").unlink()
    with pytest.raises(ForeignFileRefused, match="no such file"):
        opened(folder)


@pytest.mark.parametrize("part", ["shard.00000.mds", "index.json"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_shards_and_indexes_give_refusals_and_never_other_errors(
    tmp_path: Path, part: str, data: st.DataObject
) -> None:
    # Without hashes: with them nothing of a damaged shard is read.
    folder = write_mds(tmp_path / "mds", [SAMPLE, SAMPLE | {"key": b"2"}], change=_raw(hashes={}))
    (folder / part).write_bytes(data.draw(damaged((folder / part).read_bytes())))
    try:
        foreign = opened(folder)
    except DatasetError:
        return
    for item in items_quietly(foreign):
        assert isinstance(item, Refusal) or item.latents.shape == (4, 32, 32)  # type: ignore[union-attr]


def test_one_sample_of_a_shard_is_in_memory_at_a_time(tmp_path: Path) -> None:
    large = {"latents": np.ones((4, 256, 256), np.float16).tobytes()}
    folder = write_mds(tmp_path / "mds", [large] * 64, {"latents": "ndarray:float16:4,256,256"})
    foreign = opened(folder, fields={"latents": "latents"})
    tracemalloc.start()
    count = sum(1 for _ in foreign.items())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 64 and peak < 6 << 20  # the shard has 32 MiB


def test_the_bytes_of_an_export(tmp_path: Path) -> None:
    """The header of the first shard, the index and a sample, by the description of the format."""
    mds.export(cache_of(items(torch.float16)), "foreign", tmp_path / "mds", shard_bytes=1 << 12)
    index = json.loads((tmp_path / "mds/index.json").read_text())
    assert [shard["samples"] for shard in index["shards"]] == [1, 1, 1]
    for shard in index["shards"]:
        data = (tmp_path / "mds" / shard["raw_data"]["basename"]).read_bytes()
        assert shard["raw_data"]["hashes"] == {"sha256": hashlib.sha256(data).hexdigest()}
        number, start, end = struct.unpack("<3I", data[:12])
        assert (number, end, shard["raw_data"]["bytes"]) == (1, len(data), len(data))
        settings_of = json.loads(data[12:start])
        assert settings_of == {name: shard[name] for name in settings_of}
        names, sizes = shard["column_names"], []
        assert names == sorted(names) and shard["column_sizes"][names.index("scaling_factor")] == 8
        at = start
        for size in shard["column_sizes"]:
            sizes.append(size or struct.unpack("<I", data[at : at + 4])[0])
            at += 0 if size else 4
        assert at + sum(sizes) == end
        cells = dict(zip(names, np.split(np.frombuffer(data[at:], np.uint8), np.cumsum(sizes)[:-1]), strict=True))
        head = cells["latents"][:14].tobytes()
        assert head == b"\x12\x0e" + struct.pack("<3I", 4, 8, 16)
        assert len(cells["latents"]) == 14 + math.prod((4, 8, 16)) * 2
        assert json.loads(cells["scaled"].tobytes()) is False
