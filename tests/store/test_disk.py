from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import random
import shutil
import signal
import sqlite3
from contextlib import closing

import pytest
from helpers.other_users import open_to_others
from store_samples import (
    CLEAN,
    assert_holds,
    before_call,
    die,
    flip,
    fork,
    key,
    listing,
    packs,
    run,
    same,
    sample,
    samples,
    where,
)

from latentcache.errors import (
    EntryDamagedError,
    EntryMissingError,
    ReadOnlyError,
    SchemaError,
    StorageFullError,
    StoreError,
)
from latentcache.store import DiskStore
from latentcache.store import writer as writer_module
from latentcache.store.batch import read_batch
from latentcache.store.index import Index
from latentcache.store.upkeep import verify


def test_a_cache_holds_what_it_should_and_nothing_else(root):
    with DiskStore(root) as store:
        store.add(samples(*range(4)))
        store.add(samples(*range(2, 6)))
        with store.writer() as writer:
            writer.add(sample(1))
        assert writer.num_added == writer.bytes_written == 0, "what is there is not written again"
        assert listing(root) == [*CLEAN, "2 packs"]
    with DiskStore(root, create=False) as store:
        assert_holds(store, *range(6))
        assert store.stats().num_packs == 2
    assert json.loads((root / "CACHE.json").read_text())["schema"] == 2
    assert listing(root) == [*CLEAN, "2 packs"]


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


def test_directories_that_are_no_caches(root, tmp_path):
    with pytest.raises(StoreError, match="there is no cache here"):
        DiskStore(root, create=False)
    with pytest.raises(StoreError, match="there is no cache here"):
        DiskStore(root, read_only=True)
    assert not root.exists()
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "1.jpg").write_bytes(b"jpeg")
    with pytest.raises(StoreError, match="is not a cache"):
        DiskStore(photos)
    assert listing(photos) == ["1.jpg", "0 packs"]
    with pytest.raises(StoreError, match="not a directory"):
        DiskStore(photos / "1.jpg")
    root.mkdir()
    DiskStore(root).close()
    assert listing(root) == [*CLEAN, "0 packs"]


@pytest.mark.parametrize("schema", [1, 3, 10**9])
def test_other_formats_are_refused(root, schema):
    DiskStore(root).close()
    mark = f'{{"format": "latentcache", "schema": {schema}}}'
    (root / "CACHE.json").write_text(mark)
    for read_only in (False, True):
        with pytest.raises(SchemaError) as caught:
            DiskStore(root, read_only=read_only)
        assert caught.value.supported == 2
    assert (root / "CACHE.json").read_text() == mark


@pytest.mark.parametrize("text", [None, "", "no json", '{"format": "latentcache", "schema": "2"}'])
def test_a_mark_that_is_none_is_refused_with_what_belongs_there(root, text):
    with DiskStore(root) as store:
        store.add(samples(0, 1))
    mark = root / "CACHE.json"
    mark.unlink() if text is None else mark.write_text(text)
    for read_only in (False, True):
        with pytest.raises(StoreError, match=r"CACHE\.json.*schema") as caught:
            DiskStore(root, read_only=read_only)
        assert not isinstance(caught.value, SchemaError)
    mark.write_text('{"format": "latentcache", "schema": 2}')
    with DiskStore(root) as store:
        assert_holds(store, 0, 1)


def write_some(root, numbers, barrier):
    with DiskStore(root) as store:
        barrier.wait(60)
        with store.writer() as writer:
            for number in numbers:
                writer.add(sample(number))
                if number % 5 == 0:
                    writer.seal()
        assert_holds(store, *numbers)


def test_processes_write_and_read_at_once(root):
    barrier = fork.Barrier(2)
    orders = [random.Random(seed).sample(range(30), 30) for seed in range(2)]
    processes = [fork.Process(target=write_some, args=(root, order, barrier)) for order in orders]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        assert process.exitcode == 0
    with DiskStore(root) as store:
        assert set(store.keys()) == {key(number) for number in range(30)}
        assert_holds(store, *range(30))


# Deaths ------------------------------------------------------------------------------------------------------------


def die_at(root, name, call):
    """Add an entry, and be killed before the `call`-th call of os.<name>."""
    before_call(name, call, die)
    with DiskStore(root) as store:
        store.add(samples(1))


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
    assert run(die_at, root, name, call) == -signal.SIGKILL
    with DiskStore(root, read_only=True) as reader:  # before the index knows
        assert_holds(reader, 0)
        assert set(reader.keys()) == {key(0)}
    with DiskStore(root) as store:
        assert listing(root) == [*CLEAN, f"{1 + survives} packs"]
        assert_holds(store, 0)
        assert store.find([key(1)]) == ({key(1)} if survives else set())
        assert store.add(samples(1)) == (0 if survives else 1)
        assert_holds(store, 0, 1)


# A full disk and other refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize(("name", "call"), [("write", 2), ("write", 3), ("fsync", 1), ("fsync", 2), ("replace", 1)])
def test_a_refused_write_leaves_nothing_behind(root, monkeypatch, number, name, call):
    with DiskStore(root) as store:
        store.add(samples(0))
        with monkeypatch.context() as patched, pytest.raises(StoreError) as caught:
            patched.setattr(os, name, getattr(os, name))  # as it is, afterwards
            before_call(name, call, lambda: raise_(OSError(number, os.strerror(number))))
            store.add(samples(*range(1, 9)))
        full = number == errno.ENOSPC
        assert isinstance(caught.value, StorageFullError) == full
        assert isinstance(caught.value, ReadOnlyError) == (number == errno.EACCES)
        assert listing(root) == [*CLEAN, "1 packs"]
        assert store.find([key(1), key(2)]) == set()
        assert_holds(store, 0)
        assert store.add(samples(*range(1, 9))) == 8
        assert_holds(store, 0, 1, 2, 3)


def test_a_disk_that_is_full_for_the_index_only(root, monkeypatch):
    with DiskStore(root) as store:
        store.add(samples(0))
        monkeypatch.setattr(Index, "transaction", lambda self: raise_(StorageFullError(root, 4096)))
        with pytest.raises(StorageFullError):
            store.add(samples(1))
        assert store.find([key(1)]) == set()
    with DiskStore(root) as store:  # it can be opened and read
        assert_holds(store, 0)
    monkeypatch.undo()
    with DiskStore(root) as store:  # the pack is whole, so its work is not lost
        assert_holds(store, 0, 1)
        assert verify(store).ok


def raise_(error):
    raise error


def test_the_writers_thread_reports_and_the_first_error_wins(root, monkeypatch):
    monkeypatch.setattr(writer_module, "PACK_ENTRIES", 1)

    def full(fd, view):
        raise OSError(errno.ENOSPC, "full")

    with DiskStore(root) as store:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(StorageFullError), store.writer() as writer:
            for number in range(5):
                writer.add(sample(number))
        assert number <= 2
        with pytest.raises(ValueError, match="mine") as caught, store.writer() as writer:
            writer.add(sample(7))
            raise ValueError("mine")
        assert "sealing failed too" in caught.value.__notes__[0]
        monkeypatch.undo()
        assert store.add(samples(0)) == 1


def read_as_nobody(root):
    os.setgid(65534)
    os.setuid(65534)
    with DiskStore(root, read_only=True) as store:
        assert_holds(store, 0, 1)
        assert read_batch(store, [key(0), key(1)])["moments"].shape == (2, 4, 8, 8)
        assert store.stats().num_entries == {"image": 2}
    with pytest.raises(ReadOnlyError, match="read_only=True"):
        DiskStore(root)


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_another_user_reads_and_changes_nothing(root):
    with DiskStore(root) as store:
        store.add(samples(0, 1))
    open_to_others(root)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert run(read_as_nobody, root) == 0
    shutil.rmtree(root / "index")
    before = {path: before[path] for path in before if path.exists()}
    assert run(read_as_nobody, root) == 0
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_read_only_without_another_user(root):
    with DiskStore(root) as store:
        store.add(samples(0))
    with DiskStore(root, read_only=True) as store:
        for call in (
            lambda: store.add(samples(2)),
            store.writer,
            lambda: store.remove([key(0)]),
            lambda: store.lock("x", shared=True),
        ):
            with pytest.raises(ReadOnlyError), call() or pytest.fail("no error"):
                pass
        assert_holds(store, 0)


# Damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writes", ["marked", "disk full"])
def test_what_is_found_damaged_after_it_was_read_is_not_returned_any_more(root, monkeypatch, writes):
    with DiskStore(root) as store:
        store.add(samples(0, 1))
        read_batch(store, [key(0), key(1)])
        flip(store, 0)
        if writes == "disk full":
            monkeypatch.setattr(Index, "transaction", lambda self: raise_(StorageFullError(root, 4096)))
        assert set(verify(store).damaged) == {key(0)}
        for _ in range(2):
            with pytest.raises(EntryDamagedError):
                read_batch(store, [key(0), key(1)])
        assert_holds(store, 1)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_damaged_entry_is_an_error_once_and_then_a_miss(root, read_only):
    with DiskStore(root) as store:
        store.add(samples(0, 1))
        flip(store, 0)
    with DiskStore(root, read_only=read_only) as store:
        with pytest.raises(EntryDamagedError, match="digest") as caught:
            read_batch(store, [key(1), key(0)])
        assert caught.value.key == key(0)
        assert store.find([key(0), key(1)]) == {key(1)}
        assert list(store.damaged()) == [key(0)] and set(store.keys()) == {key(1)}
        with pytest.raises(EntryDamagedError):
            store.get(key(0))
        assert store.stats().num_damaged == 1
        assert_holds(store, 1)
    with DiskStore(root) as store:
        assert store.find([key(0)]) == (set() if not read_only else {key(0)})
        with pytest.raises(EntryDamagedError):
            store.get(key(0))
        assert store.add(samples(0)) == 1
        assert store.damaged() == {}
        assert_holds(store, 0, 1)


def test_damage_found_by_one_process_is_known_to_another(root):
    with DiskStore(root) as one:
        one.add(samples(0))
        with DiskStore(root) as two:
            flip(one, 0)
            with pytest.raises(EntryDamagedError):
                two.get(key(0))
            two.add(samples(0))
        assert_holds(one, 0)  # memory has the damaged place; the index knows better


@pytest.mark.parametrize("how", ["gone", "short", "empty"])
def test_entries_of_a_lost_pack_are_misses_at_the_next_opening(root, how, caplog):
    with DiskStore(root) as store:
        store.add(samples(0, 1))
        lost = packs(store)[0]
        store.add(samples(2))
        assert_holds(store, 2)
    if how == "gone":
        lost.unlink()
    else:
        os.truncate(lost, 0 if how == "empty" else lost.stat().st_size - 1)
    with DiskStore(root) as store:
        assert store.find([key(0), key(1), key(2)]) == {key(2)}
        assert "2 entries are lost" in caplog.text
        assert store.add(samples(0, 1)) == 2
        assert_holds(store, 0, 1, 2)


@pytest.mark.parametrize("how", ["gone", "short", "short after a read"])
def test_a_pack_that_is_lost_while_a_store_is_open(root, how):
    with DiskStore(root) as store:
        store.add(samples(0, 1))
        path = packs(store)[0]
        if how == "short after a read":
            assert_holds(store, 0)
        if how == "gone":
            path.unlink()
        else:
            os.truncate(path, where(store, 1)[1])
        with pytest.raises(EntryDamagedError):
            store.get(key(1))
        assert store.find([key(1)]) == set()
        assert store.add(samples(1)) == 1
        assert_holds(store, 1)


def test_a_mapped_pack_that_is_cut_short_does_not_kill_the_process(root):
    def child():
        large = [sample(number, shape=(64, 64, 4)) for number in range(2)]
        with DiskStore(root) as store:
            store.add(large)
            assert same(store.get(key(0)), large[0])
            os.truncate(packs(store)[0], 4096)
            with pytest.raises(EntryDamagedError, match="4,096 bytes"):
                read_batch(store, [key(1)])
            os.truncate(packs(store)[0], 0)
            assert store.record(key(0)) == large[0].record, "it was read before"

    assert run(child) == 0  # -SIGBUS if the missing pages are touched


@pytest.mark.parametrize("how", ["deleted", "garbage", "cut", "emptied", "flipped rows"])
def test_a_lost_index_is_rebuilt(root, how, caplog):
    with DiskStore(root) as store:
        store.add(samples(*range(5)))
        store.add(samples(*range(5, 8)))
    database = root / "index" / "cache.db"
    if how == "deleted":
        shutil.rmtree(root / "index")
    elif how == "garbage":
        database.write_bytes(random.Random(4).randbytes(30_000))
    elif how == "cut":
        os.truncate(database, 5000)
    elif how == "emptied":
        os.truncate(database, 0)
    else:
        database.write_bytes(database.read_bytes().replace(b'"groups":', b'"gruups":'))
    with DiskStore(root, read_only=True) as store:
        assert_holds(store, *range(8))
    with caplog.at_level(logging.INFO, "latentcache"), DiskStore(root) as store:
        assert set(store.keys()) == {key(number) for number in range(8)}
        assert_holds(store, *range(8))
        assert store.add(samples(3)) == 0
    assert ("made again from the packs" in caplog.text) == (how != "deleted")


def test_flips_anywhere_in_the_index_are_never_a_wrong_tensor(root):
    with DiskStore(root) as store:
        store.add(samples(*range(6)))
    database = root / "index" / "cache.db"
    clean, source = database.read_bytes(), random.Random(5)
    for _ in range(40):
        data = bytearray(clean)
        for _ in range(10):
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
        database.write_bytes(data)
        with DiskStore(root, read_only=True) as store:
            for number in range(6):
                try:
                    assert_holds(store, number)
                except (EntryDamagedError, EntryMissingError):
                    continue
        database.write_bytes(data)
        try:
            with DiskStore(root) as store:
                store.add(samples(*range(6)))
                for number in range(6):
                    if store.find([key(number)]):
                        try:
                            assert_holds(store, number)
                        except (EntryDamagedError, EntryMissingError):
                            continue
        except StoreError as error:
            assert "index" in str(error)
        shutil.rmtree(root / "index")
        (root / "index").mkdir()


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["generation", f"pack:{'0' * 32}", "new"])
def test_nothing_in_the_index_is_unpickled(root, tmp_path, name):
    with DiskStore(root) as store:
        store.add(samples(0))
    with closing(sqlite3.connect(root / "index" / "cache.db")) as connection, connection:
        row = "INSERT OR REPLACE INTO Cache (key, raw, store_time, size, mode, value) VALUES (?, 1, 0, 0, 4, ?)"
        connection.execute(row, (name, pickle.dumps(Bomb(tmp_path / "exploded"))))
    for read_only in (True, False):
        with DiskStore(root, read_only=read_only) as store:
            assert_holds(store, 0)
            assert set(store.keys()) == {key(0)}
    assert not (tmp_path / "exploded").exists()
