"""Verify, rebuild, prune and compact: what they find and free, and that nothing is lost that happens meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time

import pytest
from helpers.tensor_bits import read_batch
from store_samples import (
    CLEAN,
    assert_dies,
    assert_holds,
    digests,
    flip,
    key,
    listing,
    meet,
    packs,
    payload,
    same,
    sample,
    samples,
    where,
)

from latentcache import LatentCache
from latentcache.errors import EntryMissingError, StorageFullError, StoreBusyError, StoreError
from latentcache.store import DiskStore, upkeep, writer
from latentcache.store.batch import stack
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
    path, _ = where(store, number)
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    return path


# verify and rebuild --------------------------------------------------------------------------------------------------


def test_verify_marks_what_is_damaged_gone_or_unreadable(store):
    add_packs(store, range(3), [3], [4])
    flip(store, 1)
    (gone, _), broken = where(store, 3), broken_pack(store, 4)
    gone.unlink()
    report = verify(store)
    assert not report.ok and report.damaged.keys() == {key(1), key(3), key(4)} and "digest" in report.damaged[key(1)]
    assert report.unreadable.keys() == {gone.stem, broken.stem}
    assert "then `latentcache compact`" in report.unreadable[broken.stem]
    assert store.find(key(n) for n in range(5)) == {key(0), key(2)}
    again = verify(store)
    assert not again.ok and not again.damaged and again.known_damaged == report.damaged, "not fixed yet"
    assert store.add(samples(*range(5))) == 3
    assert_holds(store, *range(5))


def test_verify_finds_a_row_of_the_index_that_does_not_describe_its_pack(store, root):
    """As after an exchange of two packs of one size: the index, the file's index and the payload are each in order."""
    add_packs(store, [0], [1])
    one, two = packs(store)
    one_bytes, two_bytes = one.read_bytes(), two.read_bytes()
    assert len(one_bytes) == len(two_bytes)
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


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("how", ["rebuilt", "opened", "read only"])
def test_of_two_copies_the_intact_one_counts(root, how, which):
    with DiskStore(root) as store:
        add_packs(store, range(3))
        (first,) = packs(store)
        shutil.copy(first, store.directory.new_pack_path(new_pack_id()))
        damaged = packs(store)[which]
        damaged.write_bytes(damaged.read_bytes().replace(payload(2), bytes(len(payload(2)))))
        if how == "rebuilt":
            assert rebuild(store).num_entries == 3
    if how != "rebuilt":
        shutil.rmtree(root / "index")
    with DiskStore(root, read_only=how == "read only") as again:
        assert_holds(again, *range(3))
        if how != "read only":
            assert prune(again, digests(*range(3))).num_entries == 0 and not compact(again).damaged
            assert_holds(again, *range(3))
        assert verify(again).ok


def test_a_copy_counts_where_its_original_is_lost(store, root):
    """As after a death in a compaction, and a disk that then lost the old pack."""
    add_packs(store, range(3))
    (first,) = packs(store)
    shutil.move(first, store.directory.new_pack_path(new_pack_id()))
    with DiskStore(root) as again:
        assert again.damaged() == {}
        assert_holds(again, 0, 1, 2)
        compact(again)
        assert_holds(again, 0, 1, 2)


@pytest.mark.parametrize("name", ["index.removed-12345678/cache.db", "memo.removed-12345678/x", "manifests/.a.0.tmp"])
def test_an_opening_removes_what_a_dead_process_left(root, name):
    DiskStore(root).close()
    (root / name).parent.mkdir()
    (root / name).touch()
    DiskStore(root).close()
    assert listing(root) == [*CLEAN, "0 packs"]


# prune ---------------------------------------------------------------------------------------------------------------


def test_prune(store, root):
    add_packs(store, range(3), range(3, 5), range(5, 8))
    keep = digests(0, 5, 6, 7)
    planned = prune(store, keep, dry_run=True)
    assert planned.dry_run and len(store.find(key(n) for n in range(8))) == 8
    report = prune(root, keep)
    assert report.num_entries == 4 and report.num_bytes == 4 * sample(0).num_bytes and report.num_packs == 1
    assert {**report.to_json(), "dry_run": True} == planned.to_json()
    assert set(store.keys()) == {key(n) for n in (0, 5, 6, 7)}
    assert_holds(store, 0, 5, 6, 7)
    assert listing(root) == [*CLEAN, "2 packs"]
    assert prune(store, keep).num_entries == 0


LONG_AGO = 1_000_000_000.0


def large(number):
    """A sample that is so large that the header of a pack does not count for much."""
    return sample(number, shape=(16, 64, 64))


def change_manifests(root):
    """As a writer of manifests does. Readers come later, by the clock of the file system."""
    os.utime(root / "manifests")
    time.sleep(0.02)


@pytest.fixture
def used(root):
    """Packs of two large entries each: 0 and 1 were used first, 6 and 7 last."""
    with DiskStore(root) as store:
        for first in range(0, 8, 2):
            before = packs(store)
            store.add([large(first), large(first + 1)])
            [path] = set(packs(store)).difference(before)
            os.utime(path, (LONG_AGO + first, LONG_AGO + first))
    (root / "manifests").mkdir()
    change_manifests(root)
    return root


def shrink(root, max_bytes, *, keep=(0, 4), **options):
    return prune(root, lambda: digests(*keep), max_bytes=max_bytes, **options)


def left(root):
    with DiskStore(root, read_only=True) as store:
        return {number for number in range(8) if store.find([key(number)])}


def test_the_longest_unused_goes_first_and_what_is_in_use_stays(used):
    def file_bytes():
        return sum(path.stat().st_size for path in used.glob("packs/*/*.safetensors"))

    def one_less(num):
        """Free the bytes of so many entries."""
        limit = file_bytes() - num * large(0).num_bytes
        planned, there = shrink(used, limit, dry_run=True), left(used)
        report = shrink(used, limit)
        assert report.num_entries == planned.num_entries == len(there - left(used))
        assert report.file_bytes_left == file_bytes() <= limit

    one_less(2)  # the header of the pack that stays counts too, so that the next one goes as a whole
    assert left(used) == {0, 4, 5, 6, 7}
    with LatentCache(used) as reader:  # this is a use
        assert same(reader.get(key(5)), large(5))
    one_less(1)
    assert left(used) == {0, 4, 5}
    shrink(used, 1 << 40)
    assert left(used) == {0, 4, 5}
    assert shrink(used, 0).file_bytes_left > 0 and left(used) == {0, 4}


@pytest.mark.parametrize("max_bytes", [0, None], ids=["to a limit", "all"])
def test_what_a_running_reader_may_need_stays(used, max_bytes):
    with LatentCache(used) as reader:
        shrink(used, 1 << 40)  # it began after the manifests: nothing that it needs can go
        change_manifests(used)
        with pytest.raises(StoreBusyError, match="began before the manifests"):
            shrink(used, max_bytes, keep=[0])
        assert shrink(used, max_bytes, keep=[0], dry_run=True).num_entries > 0, "what would go once it has ended"
        assert same(reader.get(key(4)), large(4))
        change_manifests(used)
        with LatentCache(used) as later:
            reader.close()  # it overlaps with one that began after the manifests, and needs nothing that goes
            shrink(used, max_bytes, keep=[0])
            assert same(later.get(key(0)), large(0))
    assert left(used) == {0}


def test_packs_in_which_nothing_is_live_go_with_the_others(used):
    with DiskStore(used) as store:
        store.remove([key(2), key(3)])
        assert prune(store, digests(1, 5), max_bytes=1000).num_entries == 4
    assert left(used) == {1, 5}


# compact -------------------------------------------------------------------------------------------------------------


def test_compact_joins_small_packs_and_never_copies_damage(store, root):
    add_packs(store, *([n] for n in range(4)), [4, 5])
    assert compact(store, dry_run=True).num_packs_after == 1
    assert listing(root) == [*CLEAN, "5 packs"]
    keys = [key(n) for n in range(4)]
    rows, first, reader = store.rows(keys), read_batch(store, keys), DiskStore(root, read_only=True)
    flip(store, 5)
    report = compact(root)
    assert report.num_entries == 5 and report.num_packs_before == 5 and report.num_packs_after == 1
    assert report.damaged.keys() == {key(5)} and report.file_bytes_after < report.file_bytes_before
    assert listing(root) == [*CLEAN, "1 packs"]
    assert stack(keys, rows)["moments"].equal(first["moments"])
    for each in (store, reader):  # these still had the old places: read ones and others
        assert_holds(each, *range(5))
        assert each.find([key(5)]) == set()
    assert compact(store).num_entries == 0
    reader.close()


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


def test_compact_leaves_an_unreadable_pack_until_its_entries_are_there_again(store):
    """Then compact, verify, precache, compact, as the report of verify says."""
    add_packs(store, [0], [1], [2])
    path = broken_pack(store, 0)
    report = compact(store)
    assert report.unreadable.keys() == {path.stem} and path.exists() and report.num_packs_after == 2
    assert_holds(store, 1, 2)
    verify(store)
    store.add(samples(0))
    assert list(verify(store).unreadable) == [path.stem], "the file is still there"
    assert not compact(store).unreadable and not path.exists()
    assert verify(store).ok
    assert_holds(store, 0, 1, 2)


@pytest.mark.parametrize(
    ("name", "call"),
    [("write", 1), ("replace", 1), ("fsync", 3), ("replace", 2), ("unlink", 1), ("unlink", 2), ("unlink", 5)],
)
def test_a_death_in_compaction_loses_nothing(root, monkeypatch, name, call):
    with DiskStore(root) as store:
        add_packs(store, *([n] for n in range(6)))
        store.remove([key(5)])
        with monkeypatch.context() as patched:
            patched.setattr(writer, "PACK_ENTRIES", 3)
            assert_dies(name, call, compact, store)
    with DiskStore(root) as store:
        assert set(store.keys()) == {key(n) for n in range(5)}
        assert_holds(store, *range(5))
        assert verify(store).ok
        compact(store)
        assert_holds(store, *range(5))
        assert listing(root) == [*CLEAN, "1 packs"]


def test_upkeep_and_writers_keep_out_of_each_others_way(store, root):
    add_packs(store, range(3))
    with DiskStore(root) as other, other.writer() as writing:
        writing.add(sample(9))
        for call in (lambda: rebuild(root), lambda: prune(store, digests()), lambda: compact(store)):
            with pytest.raises(StoreBusyError, match=rf"cannot start: writing entries \(process {os.getpid()}"):
                call()
    with store.lock("compact", shared=False), pytest.raises(StoreBusyError, match="compact"):
        store.add(samples(10))
    assert_holds(store, 0, 1, 2, 9)


@pytest.mark.parametrize("what", ["removes", "opens"])
def test_what_others_do_before_the_index_knows_a_compacted_pack_counts(store, root, monkeypatch, what):
    """An entry that is removed stays removed, and a reader that opens loses nothing."""
    add_packs(store, range(2), range(2, 4))
    readers = []

    def act():
        readers.append(DiskStore(root, read_only=what == "opens"))
        if what == "removes":
            readers[0].remove([key(0)])

    meet(monkeypatch, upkeep, "write_pack", act)
    assert compact(store).num_entries == (3 if what == "removes" else 4)
    store.remove([key(0)])
    for reader in (store, *readers):
        assert_holds(reader, 1, 2, 3)
        with reader, pytest.raises(EntryMissingError):
            reader.get(key(0))


def test_a_full_disk_is_no_damage_of_the_index(store, monkeypatch):
    add_packs(store, [0])
    real = sqlite3.connect

    class Full(sqlite3.Connection):
        def execute(self, sql, *arguments):
            if sql.startswith(("DELETE", "UPDATE", "INSERT OR REPLACE INTO Cache")):
                super().execute("ROLLBACK")  # as SQLite does by itself
                raise sqlite3.OperationalError("database or disk is full")
            return super().execute(sql, *arguments)

    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: real(*a, **({"factory": Full} | k)))
    with pytest.raises(StorageFullError):
        store.remove([key(0)])
    monkeypatch.undo()
    assert_holds(store, 0)
