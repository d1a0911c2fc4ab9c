"""Faults that pass, and other processes at work: nothing good is marked, nothing that was asked for is left out."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3

import pytest
from helpers.other_users import open_to_others
from store_samples import key, mark, pack_of, packs, run, same, sample, samples, where

from latentcache.errors import EntryDamagedError, StorageFullError, StoreError
from latentcache.store import DiskStore, catalog, pack
from latentcache.store.base import own_entry
from latentcache.store.pack import new_pack_id, write_pack
from latentcache.store.stacking import read_batch
from latentcache.store.upkeep import compact, rebuild, verify


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


def assert_holds(store, *numbers):
    for number in numbers:
        assert same(store.get(key(number)), sample(number))


def leave_an_unknown_pack(store, number):
    """As a writer that dies between sealing and the index."""
    write_pack(store.directory.new_pack_path(new_pack_id()), [own_entry(sample(number))])


# Other processes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["while headers are read", "before files are listed"])
def test_what_another_writer_seals_during_an_opening_is_not_lost(root, monkeypatch, moment):
    with DiskStore(root) as writer:
        writer.add(samples(0))
        leave_an_unknown_pack(writer, 1)
        target = catalog if moment == "while headers are read" else catalog.CacheDirectory
        name = "read_rows" if moment == "while headers are read" else "pack_sizes"
        real = getattr(target, name)

        def slow(*args):
            found = real(*args)
            writer.add(samples(2))
            return found

        monkeypatch.setattr(target, name, slow)
        with DiskStore(root) as opened:
            monkeypatch.undo()
            assert opened.damaged() == {}
            assert_holds(opened, 0, 1, 2)


def test_what_another_process_removed_or_marked_is_stored_again(root):
    with DiskStore(root) as store, DiskStore(root) as other:
        store.add(samples(0, 1))
        assert_holds(store, 0, 1)
        other.remove([key(0)])
        mark(other, 1)
        assert store.add(samples(0, 1)) == 2
        assert other.find([key(0), key(1)]) == {key(0), key(1)} and other.damaged() == {}
        assert_holds(other, 0, 1)
        other.remove([key(0)])
        with store.writer() as writer:
            writer.add(sample(0))
        assert writer.num_added == 1


def test_a_lock_shows_what_is_there_once_it_is_held(root):
    with DiskStore(root) as store, DiskStore(root) as other:
        store.add(samples(0, 1))
        other.remove([key(0)])
        with store.lock("precache", shared=True):
            assert store.find([key(0), key(1)]) == {key(1)}


# Passing faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("call", ["get", "record", "rows"])
def test_a_pack_that_cannot_be_opened_now_is_not_damaged(root, monkeypatch, number, read_only, call):
    with DiskStore(root) as store:
        store.add(samples(0))
    with DiskStore(root, read_only=read_only) as store:
        real = os.open

        def refuse(path, *args, **kwargs):
            if str(path).endswith(".safetensors"):
                raise OSError(number, os.strerror(number))
            return real(path, *args, **kwargs)

        argument = [key(0)] if call == "rows" else key(0)
        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(StoreError, match="cannot be read now") as caught:
            getattr(store, call)(argument)
        assert type(caught.value) is StoreError
        monkeypatch.undo()
        assert store.damaged() == {}
        assert_holds(store, 0)


@pytest.mark.parametrize("error", [RuntimeError("unable to mmap: Cannot allocate memory (12)"), MemoryError("none")])
def test_a_pack_that_cannot_be_mapped_now_is_not_damaged(root, monkeypatch, error):
    with DiskStore(root) as store:
        store.add(samples(0))
        monkeypatch.setattr(pack.torch, "from_file", lambda *_, **__: (_ for _ in ()).throw(error))
        with pytest.raises(StoreError, match="cannot be read now"):
            read_batch(store, [key(0)])
        monkeypatch.setattr(pack.mmap, "mmap", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOMEM, "none")))
        report = verify(store)
        assert not report.ok and report.damaged == {} and len(report.unreadable) == 1
        monkeypatch.undo()
        assert verify(store).ok
        assert_holds(store, 0)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "a failing disk"), MemoryError("none")])
def test_a_header_that_cannot_be_read_now_is_not_damaged(root, monkeypatch, error):
    with DiskStore(root) as store:
        store.add(samples(0, 1))
        monkeypatch.setattr(os, "pread", lambda *_, **__: (_ for _ in ()).throw(error))
        with pytest.raises(StoreError, match="cannot be read now"):
            store.record(key(0))
        assert not verify(store).ok
        report = rebuild(store)
        assert len(report.unreadable) == 1
        monkeypatch.undo()
        assert store.damaged() == {}
        with DiskStore(root) as again:
            assert_holds(again, 0, 1)
        assert_holds(store, 0, 1)


def test_what_is_gone_or_cut_short_is_damaged(root):
    """The other side of the tests above: evidence marks."""
    with DiskStore(root) as store:
        store.add(samples(0))
        path = packs(store)[0]
        os.truncate(path, path.stat().st_size - 8)
        with pytest.raises(EntryDamagedError):
            store.record(key(0))
        assert store.damaged().keys() == {key(0)}


def use_as_nobody(root, forbidden, allowed):
    os.setgid(65534)
    os.setuid(65534)
    with DiskStore(root) as store:
        assert_holds(store, allowed)
        for call in (store.get, store.record, lambda name: read_batch(store, [name])):
            with pytest.raises(StoreError, match="Permission denied"):
                call(key(forbidden))
        assert store.damaged() == {}
        assert len(verify(store).unreadable) == 1
        assert len(compact(store).unreadable) == 1
        assert len(rebuild(store).unreadable) == 1
        assert store.damaged() == {}
    shutil.rmtree(root / "index")
    with DiskStore(root) as store:
        assert_holds(store, allowed)
        assert store.find([key(forbidden)]) == set() and store.damaged() == {}


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_a_pack_of_another_user_is_reported_and_not_marked(root):
    before = os.umask(0)
    try:
        with DiskStore(root) as store:
            store.add(samples(0))
            store.add(samples(1))
            pack_of(store, 0).chmod(0o600)
    finally:
        os.umask(before)
    (root / "index" / "cache.db").chmod(0o666)
    open_to_others(root, 0o777)
    assert run(use_as_nobody, root, 0, 1) == 0
    with DiskStore(root) as store:
        assert_holds(store, 0, 1)


def test_an_opening_sweeps_the_manifests_too(root):
    DiskStore(root).close()
    (root / "manifests").mkdir()
    (root / "manifests" / ".train.safetensors.0.tmp").write_text("half")
    (root / "manifests" / "train.safetensors").write_text("whole")
    DiskStore(root).close()
    assert os.listdir(root / "manifests") == ["train.safetensors"]


def test_a_pack_that_was_cut_short_and_is_gone_now_is_damaged_where_it_was_cut(root):
    with DiskStore(root) as store:
        store.add(samples(0, 1, 2))
        path = pack_of(store, 0)
        first, *_, last = sorted(range(3), key=lambda number: where(store, number)[1])
        end = where(store, last)[1]
    with DiskStore(root, read_only=True) as store:
        os.truncate(path, end)
        store.rows([key(first)])
        path.unlink()
        with pytest.raises(EntryDamagedError, match="its pack is gone"):
            store.rows([key(last)])
        assert len(store.rows([key(first)])) == 1, "it was mapped when it was there"


def test_an_entry_in_a_pack_that_cannot_be_read_during_a_rebuild_is_live_once(root, monkeypatch):
    with DiskStore(root) as store:
        store.add(samples(0))
        out_of_reach = pack_of(store, 0)
        # As a compaction leaves it that was interrupted before the old pack was deleted.
        write_pack(store.directory.new_pack_path(new_pack_id()), [own_entry(sample(0)), own_entry(sample(1))])
    real = catalog.read_row

    def read(path):
        if path == out_of_reach:
            raise StoreError("it cannot be read now")
        return real(path)

    monkeypatch.setattr(catalog, "read_row", read)
    rebuild(root)
    monkeypatch.undo()
    with DiskStore(root) as store:
        assert sorted(store.keys()) == sorted([key(0), key(1)])
        assert_holds(store, 0, 1)
        store.remove([key(0)])
    with DiskStore(root) as store:
        assert store.find([key(0)]) == set()


def test_a_disk_that_is_too_full_for_the_index_can_be_opened_and_read(root, monkeypatch):
    with DiskStore(root) as store:
        store.add(samples(0))
        leave_an_unknown_pack(store, 1)

    def refuse(*_):
        raise StorageFullError(root, 4096)

    monkeypatch.setattr(catalog.Index, "transaction", refuse)
    with DiskStore(root) as store:
        assert_holds(store, 0)
    monkeypatch.undo()
    with DiskStore(root) as store:
        assert_holds(store, 0, 1)
        assert verify(store).orphans == ()


def test_an_index_that_cannot_be_opened_leaves_nothing_open(root, monkeypatch):
    DiskStore(root).close()
    real = sqlite3.connect

    class Refusing(sqlite3.Connection):
        def execute(self, sql, *arguments):
            if sql.startswith("INSERT OR REPLACE INTO Settings"):
                raise sqlite3.OperationalError("disk I/O error")
            return super().execute(sql, *arguments)

    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: real(*a, **({"factory": Refusing} | k)))
    with DiskStore(root) as store:
        with pytest.raises(StoreError) as caught:  # which keeps the frames, and what they have open
            store.add(samples(0))
        names = [os.path.realpath(f"/dev/fd/{fd}") for fd in os.listdir("/dev/fd")]
        assert caught.value and not [name for name in names if name.endswith("cache.db")]


def test_an_index_whose_folder_cannot_be_listed_now_has_no_size(root, monkeypatch):
    with DiskStore(root) as store:
        real = os.scandir

        def refuse(path):
            if str(path) == str(root / "index"):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return real(path)

        monkeypatch.setattr(os, "scandir", refuse)
        with pytest.raises(StoreError, match=r"index: cannot be read now: .*Too many open files"):
            store.stats()
        monkeypatch.undo()
        assert store.stats().index_bytes > 0


def test_an_error_of_the_system_at_the_opening_is_a_typed_error(root, monkeypatch):
    DiskStore(root).close()

    def refuse(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("pathlib.Path.exists", refuse)
    for call in (DiskStore, verify, compact, rebuild):
        with pytest.raises(StoreError, match="cannot be"):
            call(root)
