from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sqlite3
from pathlib import Path

import pytest
from store_samples import (
    CLEAN,
    assert_holds,
    before_call,
    die,
    flip,
    key,
    listing,
    pack_of,
    packs,
    payload,
    run,
    same,
    sample,
    samples,
)

from latentcache.errors import EntryDamagedError, EntryMissingError, StorageFullError, StoreBusyError, StoreError
from latentcache.store import DiskStore, directory, upkeep, writer
from latentcache.store.batch import read_batch, stack
from latentcache.store.pack import new_pack_id
from latentcache.store.upkeep import compact, prune, rebuild, verify


@pytest.fixture
def store(root):
    with DiskStore(root) as store:
        yield store


def add_packs(store, *groups):
    for group in groups:
        store.add(samples(*group))


def broken_pack(store, number):
    """The pack of a sample, after a flip in its header."""
    path = pack_of(store, number)
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    return path


# verify ------------------------------------------------------------------------------------------------------------


def test_verify_marks_what_is_damaged(store, root):
    add_packs(store, range(3))
    flip(store, 1)
    report = verify(root)  # by path: read-write, as the directory is
    assert not report.ok and report.damaged.keys() == {key(1)} and "digest" in report.damaged[key(1)]
    assert store.damaged().keys() == {key(1)}
    again = verify(store)
    assert not again.ok and not again.damaged and again.known_damaged == report.damaged, "not fixed yet"
    assert store.add(samples(1)) == 1
    assert_holds(store, 0, 1, 2)
    assert verify(store).ok


def test_verify_reports_packs_that_are_gone_or_unreadable(store, root):
    add_packs(store, [0], [1], [2])
    gone, broken = pack_of(store, 0), broken_pack(store, 1)
    gone.unlink()
    report = verify(store)
    assert report.damaged.keys() == {key(0), key(1)}
    assert report.unreadable.keys() == {gone.stem, broken.stem}
    assert store.find([key(0), key(1), key(2)]) == {key(2)}


def test_verify_finds_a_row_of_the_index_that_does_not_describe_its_pack(store, root):
    """As after an exchange of two packs of one size: the index, the file's index and the payload are each in order."""
    add_packs(store, [0], [1])
    one, two = packs(store)
    assert one.stat().st_size == two.stat().st_size
    one_bytes, two_bytes = one.read_bytes(), two.read_bytes()
    one.write_bytes(two_bytes)
    two.write_bytes(one_bytes)
    report = verify(root)
    assert report.damaged.keys() == {key(0), key(1)}
    assert all("do not agree" in reason for reason in report.damaged.values())
    assert rebuild(store).num_entries == 2
    assert_holds(store, 0, 1)
    assert verify(store).ok


def test_subsets_together_are_everything(store):
    add_packs(store, *([n] for n in range(8)))
    whole = verify(store)
    assert whole.ok and whole.bytes_read == 8 * sample(0).num_bytes
    assert json.loads(json.dumps(whole.to_json()))["ok"] is True
    reports = [verify(store, subset=(n, 3)) for n in (1, 2, 3)]
    assert sum(report.num_packs for report in reports) == sum(report.num_entries for report in reports) == 8
    for subset in ((0, 3), (4, 3), (1, 0)):
        with pytest.raises(StoreError, match="subset"):
            verify(store, subset=subset)


# rebuild -----------------------------------------------------------------------------------------------------------


def test_of_two_copies_a_damaged_one_is_never_a_wrong_value(store):
    add_packs(store, range(3))
    (first,) = packs(store)
    second = store.directory.new_pack_path(new_pack_id())
    shutil.copy(first, second)
    at = first.read_bytes().index(payload(2))
    for damaged in (first, second):
        clean = damaged.read_bytes()
        data = bytearray(clean)
        data[at] ^= 1
        damaged.write_bytes(data)
        assert rebuild(store).num_entries == 3
        assert_holds(store, 0, 1)
        try:
            assert_holds(store, 2)
        except EntryDamagedError:
            assert store.add(samples(2)) == 1
            assert_holds(store, 2)
        damaged.write_bytes(clean)


# prune -------------------------------------------------------------------------------------------------------------


def test_prune(store, root):
    add_packs(store, range(3), range(3, 5), range(5, 8))
    keep = [key(n) for n in (0, 5, 6, 7)]
    planned = prune(store, keep, dry_run=True)
    assert planned.dry_run and len(store.find(key(n) for n in range(8))) == 8
    report = prune(root, keep)
    assert report.num_entries == 4 and report.num_bytes == 4 * sample(0).num_bytes and report.num_packs == 1
    assert {**report.to_json(), "dry_run": True} == planned.to_json()
    assert set(store.keys()) == set(keep)
    assert_holds(store, 0, 5, 6, 7)
    assert listing(root) == [*CLEAN, "2 packs"]
    assert prune(store, keep).num_entries == 0
    with pytest.raises(StoreError, match="not a key"):
        prune(store, ["photo.jpg"])


# compact -----------------------------------------------------------------------------------------------------------


def test_compact_joins_small_packs(store, root):
    add_packs(store, *([n] for n in range(5)))
    assert compact(store, dry_run=True).num_packs_after == 1
    assert listing(root) == [*CLEAN, "5 packs"]
    report = compact(root)
    assert report.num_entries == 5 and report.num_packs_before == 5 and report.num_packs_after == 1
    assert report.file_bytes_after < report.file_bytes_before
    assert listing(root) == [*CLEAN, "1 packs"]
    assert_holds(store, *range(5))  # this store still had the old places
    assert verify(store).ok
    again = compact(store)
    assert again.num_entries == 0 and again.num_packs_after == 1


def test_compact_drops_dead_rows(store, monkeypatch):
    monkeypatch.setattr(upkeep, "SMALL_FILE_BYTES", 0)
    add_packs(store, range(10), range(10, 20))
    store.remove([key(n) for n in range(4)])
    store.remove([key(n) for n in range(10, 12)])  # a fifth: not worth it
    before = packs(store)
    report = compact(store)
    assert report.num_entries == 6 and len(set(packs(store)) & set(before)) == 1
    assert store.find([key(0)]) == set()
    assert_holds(store, *range(4, 10), *range(12, 20))
    assert rebuild(store).num_entries == 6 + 10


def test_compact_never_copies_damage(store):
    add_packs(store, [0, 1], [2])
    flip(store, 1)
    report = compact(store)
    assert report.damaged.keys() == {key(1)} and report.num_packs_after == 1
    assert store.find([key(1)]) == set()
    assert_holds(store, 0, 2)
    assert verify(store).ok


def test_a_pack_that_cannot_be_removed_now_goes_with_a_later_compaction(store, root, monkeypatch):
    """As on Windows, while a process has it mapped."""
    add_packs(store, [0], [1])
    old = packs(store)

    def refuses(path, missing_ok=False):
        raise PermissionError(errno.EACCES, "in use")

    with monkeypatch.context() as patched:
        patched.setattr(directory, "KEEPS_MAPPED", True)
        patched.setattr(Path, "unlink", refuses)
        assert compact(store).num_entries == 2
    assert len(packs(store)) == 3
    with DiskStore(root) as again:
        assert_holds(again, 0, 1)
        assert len(list(again.keys())) == 2
        compact(again)
        assert len(packs(again)) == 1 and not {*packs(again)} & {*old}
        assert_holds(again, 0, 1)


def test_compact_leaves_a_pack_that_it_cannot_read(store):
    add_packs(store, [0], [1], [2])
    path = broken_pack(store, 0)
    report = compact(store)
    assert report.unreadable.keys() == {path.stem} and path.exists() and report.num_packs_after == 2
    assert_holds(store, 1, 2)


def test_a_pack_with_a_damaged_header_is_gone_once_its_entries_are_there_again(store):
    """verify, precache, compact: what the report of verify says."""
    add_packs(store, [0], [1])
    path = broken_pack(store, 0)
    assert "then `latentcache compact`" in verify(store).unreadable[path.stem]
    store.add(samples(0))
    assert list(verify(store).unreadable) == [path.stem], "the file is still there"
    assert not compact(store).unreadable and not path.exists()
    assert verify(store).ok
    assert_holds(store, 0, 1)


def test_readers_go_on_while_packs_move(store, root):
    add_packs(store, *([n] for n in range(6)))
    with DiskStore(root) as warm, DiskStore(root) as cold, DiskStore(root, read_only=True) as reader:
        keys = [key(n) for n in range(6)]
        rows, first = warm.rows(keys), read_batch(warm, keys)
        compact(store)
        for found in (stack(keys, rows), read_batch(warm, keys), read_batch(cold, keys)):
            assert found["moments"].equal(first["moments"])
        assert_holds(reader, *range(6))
        assert reader.damaged() == cold.damaged() == {}


def die_in_compaction(root, name, call):
    with DiskStore(root) as store:
        writer.PACK_ENTRIES = 3
        before_call(name, call, die)
        compact(store)


@pytest.mark.parametrize(
    ("name", "call"),
    [("write", 1), ("replace", 1), ("fsync", 3), ("replace", 2), ("unlink", 1), ("unlink", 2), ("unlink", 5)],
)
def test_a_death_in_compaction_loses_nothing(root, name, call):
    with DiskStore(root) as store:
        add_packs(store, *([n] for n in range(6)))
        store.remove([key(5)])
    assert run(die_in_compaction, root, name, call) == -signal.SIGKILL
    with DiskStore(root) as store:
        assert set(store.keys()) == {key(n) for n in range(5)}
        assert_holds(store, *range(5))
        assert verify(store).ok
        compact(store)
        assert_holds(store, *range(5))
        assert listing(root) == [*CLEAN, "1 packs"]


def test_upkeep_and_writers_keep_out_of_each_others_way(store, root):
    add_packs(store, range(3))
    with DiskStore(root) as other, other.writer() as writer:
        writer.add(sample(9))
        for call in (lambda: rebuild(root), lambda: prune(store, []), lambda: compact(store)):
            with pytest.raises(StoreBusyError, match=rf"cannot start: writing entries \(process {os.getpid()}"):
                call()
    with store.lock("compact", shared=False), pytest.raises(StoreBusyError, match="compact"):
        store.add(samples(10))
    assert_holds(store, 0, 1, 2, 9)


def test_a_copy_counts_where_its_original_is_lost(store, root):
    """As after a death in a compaction, and a disk that then lost the old pack."""
    add_packs(store, range(3))
    (first,) = packs(store)
    copy = store.directory.new_pack_path(new_pack_id())
    shutil.copy(first, copy)
    first.unlink()
    with DiskStore(root) as again:
        assert again.damaged() == {}
        assert_holds(again, 0, 1, 2)
        compact(again)
        assert_holds(again, 0, 1, 2)


def test_a_full_disk_is_no_damage_of_the_index(store, monkeypatch):
    add_packs(store, [0])
    real = sqlite3.connect

    class Full(sqlite3.Connection):
        def execute(self, sql, *arguments):
            if sql.startswith(("DELETE", "UPDATE", "INSERT OR REPLACE INTO Cache")):
                super().execute("ROLLBACK")  # as SQLite does by itself
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise error
            return super().execute(sql, *arguments)

    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: real(*a, **({"factory": Full} | k)))
    with pytest.raises(StorageFullError):
        store.remove([key(0)])
    monkeypatch.undo()
    assert_holds(store, 0)


def test_what_is_removed_during_a_compaction_stays_removed(store, root, monkeypatch):
    add_packs(store, range(3), range(3, 6))
    write = upkeep.write_pack

    def write_and_remove(path, entries):
        with DiskStore(root) as other:
            other.remove([key(1)])
        return write(path, entries)

    monkeypatch.setattr(upkeep, "write_pack", write_and_remove)
    assert compact(store).num_entries == 5
    assert set(store.keys()) == {key(n) for n in (0, 2, 3, 4, 5)}


def test_a_reader_that_opens_during_a_compaction_loses_nothing(store, root, monkeypatch):
    """It opens between the sealing of a compaction's pack and the moment when the index knows it."""
    add_packs(store, range(2), range(2, 4))
    readers, write = [], upkeep.write_pack

    def write_and_open(*args):
        head = write(*args)
        readers.append(DiskStore(root, read_only=True))
        return head

    monkeypatch.setattr(upkeep, "write_pack", write_and_open)
    compact(store)
    store.remove([key(0)])
    with readers[0] as reader:
        with pytest.raises(EntryMissingError):
            reader.get(key(0))
        assert same(reader.get(key(1)), sample(1))


@pytest.mark.parametrize("name", ["index.removed-12345678/cache.db", "memo.removed-12345678/x", "manifests/.a.0.tmp"])
def test_an_opening_removes_what_a_dead_process_left(root, name):
    DiskStore(root).close()
    (root / name).parent.mkdir()
    (root / name).touch()
    DiskStore(root).close()
    assert listing(root) == [*CLEAN, "0 packs"]
