"""A store in a directory: what lies there, deaths and refused writes, other users, packs that come, advice to read."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from store_samples import (
    CLEAN,
    assert_dies,
    assert_holds,
    before_call,
    key,
    listing,
    meet,
    packs,
    payload,
    raise_,
    run,
    sample,
    samples,
    where,
)

from latentcache.errors import (
    ReadOnlyError,
    SchemaError,
    StorageFullError,
    StoreBusyError,
    StoreError,
    UnsafeStoreError,
)
from latentcache.store import DiskStore, disk, table
from latentcache.store import writer as writer_module
from latentcache.store.entry import own_entry
from latentcache.store.index import Index
from latentcache.store.pack import new_pack_id, pack_buffers
from latentcache.store.upkeep import verify


@pytest.mark.parametrize("numbers", [[0], [0, 1]], ids=["all", "a part"])
def test_what_another_writer_stores_meanwhile_is_there_once(root, monkeypatch, numbers):
    """Between the look into the index and the row in it."""
    with DiskStore(root) as store, DiskStore(root) as other:
        meet(monkeypatch, disk, "write_pack", lambda: other.add(samples(0, 2)))
        assert store.add(samples(*numbers)) == len(numbers) - 1
        for each in (store, other):
            assert sorted(each.keys()) == sorted({key(0), key(2), *map(key, numbers)})
            assert_holds(each, 2, *numbers)
    assert listing(root) == [*CLEAN, f"{len(numbers)} packs"]


LIMITS = {"PACK_BYTES": 3 * sample(0).num_bytes, "PACK_ENTRIES": 2, "PACK_AGE_S": 0.0}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_pack_is_sealed_when_it_is_full_or_old(root, monkeypatch, limit):
    monkeypatch.setattr(writer_module, limit, LIMITS[limit])
    with DiskStore(root) as store:
        with store.writer() as writer:
            for number in range(7):
                writer.add(sample(number))
        assert writer.num_added == 7 and len(packs(store)) >= 3
        assert writer.bytes_written == store.stats().file_bytes
        assert_holds(store, *range(7))


def test_the_places_of_entries_are_those_that_a_look_finds(root, monkeypatch):
    """With a table in parts, packs of several rows, and more keys than are looked up at once."""
    monkeypatch.setattr(table, "_CHUNK", 4)
    with DiskStore(root) as store:
        for numbers in (range(3), range(3, 8), [8]):
            store.add(samples(*numbers))
        keys = [key(number) for number in (8, 99, *range(8), 8)]
        ids, places = store.places(np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(-1, 32))
        found = [(ids[pack], row) if pack >= 0 else None for pack, row in places.tolist()]
        assert found == [place and (place.pack.id, place.row) for place in store.look_up(keys)]
        assert found[1] is None and store.find(keys) == {*keys} - {key(99)} and len({*found}) == 10


def test_directories_that_are_no_caches(root, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "1.jpg").write_bytes(b"jpeg")
    for path, options, message in (
        (root, {"create": False}, "there is no cache here"),
        (root, {"read_only": True}, "there is no cache here"),
        (photos, {}, "is not a cache"),
        (photos / "1.jpg", {}, "not a directory"),
    ):
        with pytest.raises(StoreError, match=message):
            DiskStore(path, **options)
    assert not root.exists() and listing(photos) == ["1.jpg", "0 packs"]
    root.mkdir()
    DiskStore(root).close()
    assert listing(root) == [*CLEAN, "0 packs"]


MARK = '{"format": "latentcache", "schema": 2}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MARK.replace("2", "1"), SchemaError),
        (MARK.replace("2", "3"), SchemaError),
        (MARK.replace("2", '"2"'), UnsafeStoreError),
        ("no json", UnsafeStoreError),
        (None, StoreError),
    ],
)
def test_a_mark_of_another_format_or_of_none_is_refused_and_left(root, text, expected):
    with DiskStore(root) as store:
        store.add(samples(0, 1))
    mark = root / "CACHE.json"
    assert json.loads(mark.read_text()) == json.loads(MARK)
    mark.unlink() if text is None else mark.write_text(text)
    for read_only in (False, True):
        with pytest.raises(StoreError, match="format 2" if expected is SchemaError else "schema") as caught:
            DiskStore(root, read_only=read_only)
        assert type(caught.value) is expected
    assert mark.exists() == (text is not None) and (text is None or mark.read_text() == text)
    mark.write_text(MARK)
    with DiskStore(root) as store:
        assert_holds(store, 0, 1)


# Deaths and refused writes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "call", "survives"),
    [
        ("write", 2, False),  # the temporary file is empty
        ("fsync", 1, False),  # the folder is not durable
        ("fsync", 2, False),  # written, not synced
        ("replace", 1, False),  # synced, not renamed
        ("fsync", 3, True),  # renamed: the pack is whole, the index does not know it
    ],
)
def test_a_death_at_each_step(root, name, call, survives):
    with DiskStore(root) as store:
        store.add(samples(0))
    assert_dies(name, call, lambda: DiskStore(root).add(samples(1)))
    with DiskStore(root, read_only=True) as reader:  # before the index knows
        assert_holds(reader, 0)
        assert set(reader.keys()) == {key(0)}
    with DiskStore(root) as store:
        assert listing(root) == [*CLEAN, f"{1 + survives} packs"]
        assert_holds(store, 0)
        assert store.find([key(1)]) == ({key(1)} if survives else set())
        assert store.add(samples(1)) == (0 if survives else 1)
        assert_holds(store, 0, 1)


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.ENOSPC, StorageFullError), (errno.EIO, StoreError), (errno.EACCES, ReadOnlyError)],
)
@pytest.mark.parametrize(("name", "call"), [("write", 3), ("fsync", 1), ("fsync", 2), ("replace", 1)])
def test_a_refused_write_leaves_nothing_behind(root, monkeypatch, number, expected, name, call):
    with DiskStore(root) as store:
        store.add(samples(0))
        with monkeypatch.context() as patched, pytest.raises(StoreError) as caught:
            patched.setattr(os, name, getattr(os, name))  # as it is, afterwards
            before_call(name, call, lambda: raise_(OSError(number, os.strerror(number))))
            store.add(samples(*range(1, 9)))
        assert type(caught.value) is expected
        assert listing(root) == [*CLEAN, "1 packs"]
        assert store.find([key(1), key(2)]) == set()
        assert_holds(store, 0)
        assert store.add(samples(*range(1, 9))) == 8
        assert_holds(store, 0, 1, 2, 3)


# Readers that may not write ------------------------------------------------------------------------------------------


def read_as_nobody(root):
    os.setgid(65534)
    os.setuid(65534)
    with DiskStore(root, read_only=True) as store:
        assert_holds(store, 0, 1)
        assert store.stats().num_entries == {"image": 2}
    with pytest.raises(ReadOnlyError, match="read_only=True"):
        DiskStore(root)


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_another_user_reads_and_changes_nothing(root):
    with DiskStore(root) as store:
        store.add(samples(0, 1))
    for folder in (root, *root.parents):  # pytest makes them for the user that runs it alone
        if Path(tempfile.gettempdir()) in folder.parents:
            folder.chmod(0o755)
    for _ in range(2):  # with an index, and without one
        before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
        assert run(read_as_nobody, root) == 0
        assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
        shutil.rmtree(root / "index", ignore_errors=True)


def test_a_read_only_store_refuses_each_change(root):
    with DiskStore(root) as store:
        store.add(samples(0))
    with DiskStore(root, read_only=True) as store:
        lock = store.lock("x", shared=True).__enter__
        for call in (lambda: store.add(samples(2)), store.writer, lambda: store.remove([key(0)]), lock):
            with pytest.raises(ReadOnlyError):
                call()
        assert_holds(store, 0)


# Packs that come from elsewhere --------------------------------------------------------------------------------------


@pytest.fixture
def store(root):
    with DiskStore(root) as store:
        store.add(samples(0, 1))
        store.add(samples(2))
        yield store


def packed(number):
    """The id and the bytes of a pack that holds this sample."""
    row, _, buffers = pack_buffers(new_pack_id(), [own_entry(sample(number))])
    return row.pack.id, b"".join(buffers)


def test_a_pack_is_taken_once_nothing_refuses_it(store, monkeypatch):
    """While upkeep works, by a reader, and where the index cannot be written; then it is taken after all."""
    (pack, data), (_, another) = packed(7), packed(8)
    with DiskStore(store.path) as other, other.lock("compacting", shared=False), pytest.raises(StoreBusyError):
        store.take_pack(pack, [data], len(data))
    with DiskStore(store.path, read_only=True) as reader, pytest.raises(ReadOnlyError):
        reader.take_pack(pack, [data], len(data))
    assert not list((store.path / "packs").rglob(f"*{pack}*"))
    with monkeypatch.context() as patched:  # the disk is full for the index alone
        patched.setattr(Index, "transaction", lambda self: raise_(StorageFullError(store.path, 4096)))
        for call in (lambda: store.take_pack(pack, [data], len(data)), lambda: store.add(samples(9))):
            with pytest.raises(StorageFullError):
                call()
        assert store.directory.pack_path(pack).stat().st_size == len(data) and store.find([key(7), key(9)]) == set()
        with DiskStore(store.path) as again:
            assert_holds(again, 0, 1, 2)
    assert store.take_pack(pack, [data[:7], data[7:]], len(data)) == 1
    assert store.take_pack(pack, [another], len(another)) == 0, "it replaces nothing"
    with DiskStore(store.path) as again:  # the pack of 9 was whole, so nothing is lost
        assert_holds(again, 7, 9)
        assert again.find([key(8)]) == set() and verify(again).ok
    assert not list((store.path / "packs").rglob("*.tmp"))


# What is read soon ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice")
def test_what_is_read_soon_is_advised_where_that_can_be_done(store, monkeypatch):
    advised = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, num_bytes, _: advised.append((offset, num_bytes)))
    store.prefetch([key(2), key(99)])
    store.prefetch([key(1), key(0)], whole_packs=True)
    assert advised == [(where(store, 2)[1], len(payload(2))), (0, 0)]
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: raise_(OSError(errno.EINVAL, "refused")))
    assert_holds(store, 0)
    monkeypatch.delattr(os, "posix_fadvise")
    assert_holds(store, 2)
