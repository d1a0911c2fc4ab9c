"""What is lost or damaged in a cache is a miss, never a wrong value; what cannot be read now is left as it is."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch
from helpers.tensor_bits import read_batch
from store_samples import assert_holds, flip, key, meet, packs, raise_, run, same, sample, samples, where

from latentcache.errors import EntryDamagedError, StorageFullError, StoreError
from latentcache.store import DiskStore, disk, pack
from latentcache.store.entry import own_entry
from latentcache.store.index import Index
from latentcache.store.pack import new_pack_id, write_pack
from latentcache.store.upkeep import verify


@pytest.fixture(autouse=True)
def _filled(root):
    with DiskStore(root) as store:
        store.add(samples(0, 1))


# Entries and packs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writes", ["marked", "disk full"])
def test_what_is_found_damaged_after_it_was_read_is_not_returned_any_more(root, monkeypatch, writes):
    with DiskStore(root) as store:
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
    with DiskStore(root) as another, DiskStore(root, read_only=read_only) as store:
        flip(store, 0)
        with pytest.raises(EntryDamagedError, match="digest") as caught:
            read_batch(store, [key(1), key(0)])
        assert caught.value.key == key(0)
        assert store.find([key(0), key(1)]) == {key(1)}
        assert list(store.damaged()) == [key(0)] and set(store.keys()) == {key(1)}
        with pytest.raises(EntryDamagedError):
            store.get(key(0))
        assert store.stats().num_damaged == 1
        assert_holds(store, 1)
        with DiskStore(root) as again:
            assert again.find([key(0)]) == (set() if not read_only else {key(0)})
            with pytest.raises(EntryDamagedError):
                again.get(key(0))
            assert again.add(samples(0)) == 1
            assert again.damaged() == {}
            assert_holds(again, 0, 1)
        assert_holds(another, 0)  # memory has the damaged place; the index knows better


@pytest.mark.parametrize("how", ["gone", "short", "empty"])
def test_entries_of_a_lost_pack_are_misses_while_a_store_is_open_and_at_the_next_opening(root, how, caplog):
    with DiskStore(root) as store, DiskStore(root, read_only=True) as reader:
        lost, at = where(store, 1)
        store.add(samples(2))
        if how == "gone":
            lost.unlink()
        else:
            os.truncate(lost, 0 if how == "empty" else at)
        with pytest.raises(EntryDamagedError):
            reader.get(key(1))
        assert reader.find([key(1), key(2)]) == {key(2)}
    with DiskStore(root) as store:
        assert store.find([key(0), key(1), key(2)]) == {key(2)}
        assert "2 entries are lost" in caplog.text
        assert store.add(samples(0, 1)) == 2
        assert_holds(store, 0, 1, 2)


def test_a_mapped_pack_that_is_cut_short_does_not_kill_the_process(tmp_path):
    def child():
        large = [sample(number, shape=(64, 64, 4)) for number in range(2)]
        with DiskStore(tmp_path / "large") as store:
            store.add(large)
            assert same(store.get(key(0)), large[0])
            os.truncate(packs(store)[0], 4096)
            with pytest.raises(EntryDamagedError, match="4,096 bytes"):
                read_batch(store, [key(1)])
            os.truncate(packs(store)[0], 0)
            assert store.record(key(0)) == large[0].record, "it was read before"

    assert run(child) == 0  # -SIGBUS if the missing pages are touched


# The index -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deleted", "garbage", "cut", "emptied", "rows", "names"])
def test_a_lost_index_is_rebuilt(root, how, caplog):
    with DiskStore(root) as store:
        store.add(samples(2, 3))
    database = root / "index" / "cache.db"
    data = database.read_bytes()
    if how == "deleted":
        shutil.rmtree(root / "index")
    else:
        garbage = random.Random(4).randbytes(30_000)
        rows, names = data.replace(b'"groups":', b'"gruups":'), data.replace(b"pack:", b"pick:")
        kinds = {"garbage": garbage, "cut": data[:5000], "emptied": b"", "rows": rows, "names": names}
        database.write_bytes(kinds[how])
    with DiskStore(root, read_only=True) as store:
        assert_holds(store, *range(4))
    with caplog.at_level(logging.INFO, "latentcache"), DiskStore(root) as store:
        assert set(store.keys()) == {key(number) for number in range(4)}
        assert_holds(store, *range(4))
        assert store.add(samples(3)) == 0
    assert ("rebuilt from the packs" in caplog.text) == (how != "deleted")


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["generation", f"pack:{'0' * 32}", "new"])
def test_nothing_in_the_index_is_unpickled(root, tmp_path, name):
    with closing(sqlite3.connect(root / "index" / "cache.db")) as connection, connection:
        row = "INSERT OR REPLACE INTO Cache (key, raw, store_time, size, mode, value) VALUES (?, 1, 0, 0, 4, ?)"
        connection.execute(row, (name, pickle.dumps(Bomb(tmp_path / "exploded"))))
    for read_only in (True, False):
        with DiskStore(root, read_only=read_only) as store:
            assert_holds(store, 0)
            assert set(store.keys()) == {key(0), key(1)}
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(("place", "name"), [(disk, "read_rows"), (disk.CacheDirectory, "pack_sizes")])
def test_what_another_writer_seals_during_an_opening_is_not_lost(root, monkeypatch, place, name):
    """While headers are read, or before files are listed."""
    with DiskStore(root) as writer:
        write_pack(writer.directory.new_pack_path(new_pack_id()), [own_entry(sample(2))])  # of a writer that died
        meet(monkeypatch, place, name, lambda: writer.add(samples(3)))
        with DiskStore(root) as opened:
            assert opened.damaged() == {}
            assert_holds(opened, 0, 2, 3)


# Faults that pass ----------------------------------------------------------------------------------------------------


FAULTS = [*(OSError(number, "refused") for number in (errno.EMFILE, errno.EIO, errno.EACCES))]
FAULTS += [RuntimeError("unable to mmap: Cannot allocate memory (12)"), MemoryError("none")]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_pack_that_cannot_be_opened_or_mapped_now_is_not_damaged(root, monkeypatch, fault, read_only):
    def refuse(path, *args, genuine=os.open, **options):
        return raise_(fault) if str(path).endswith(".safetensors") else genuine(path, *args, **options)

    with DiskStore(root, read_only=read_only) as store:
        if isinstance(fault, OSError):
            monkeypatch.setattr(os, "open", refuse)
        else:
            monkeypatch.setattr(torch, "from_file", lambda *_, **__: raise_(fault))
            monkeypatch.setattr(pack.mmap, "mmap", lambda *_, **__: raise_(OSError(errno.ENOMEM, "none")))
        for call in (store.get, store.record, lambda each: store.rows([each])):
            with pytest.raises(StoreError, match="cannot be read now") as caught:
                call(key(0))
            assert type(caught.value) is StoreError
        report = verify(store)
        assert not report.ok and report.damaged == {} and len(report.unreadable) == 1
        monkeypatch.undo()
        assert verify(store).ok and store.damaged() == {}
        assert_holds(store, 0)


def test_an_index_that_cannot_be_looked_at_is_not_taken_for_lost(root, monkeypatch):
    def refuse(path, *, genuine=Path.stat, **options):
        return raise_(OSError(errno.EIO, "the disk fails")) if path.name == "cache.db" else genuine(path, **options)

    with DiskStore(root) as store:
        monkeypatch.setattr(Path, "stat", refuse)
        assert store.add(samples(7)) == 1
        monkeypatch.undo()
        assert_holds(store, 0, 1, 7)
