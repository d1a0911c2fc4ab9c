"""Faults that pass, and other processes at work: nothing good is marked, nothing that was asked for is left out."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from store_samples import assert_holds, key, sample, samples

from latentcache.errors import StoreError
from latentcache.store import DiskStore, disk, pack
from latentcache.store.batch import read_batch
from latentcache.store.entry import own_entry
from latentcache.store.pack import new_pack_id, write_pack
from latentcache.store.upkeep import verify


def leave_an_unknown_pack(store, number):
    """As a writer that dies between sealing and the index."""
    write_pack(store.directory.new_pack_path(new_pack_id()), [own_entry(sample(number))])


# Other processes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["while headers are read", "before files are listed"])
def test_what_another_writer_seals_during_an_opening_is_not_lost(root, monkeypatch, moment):
    with DiskStore(root) as writer:
        writer.add(samples(0))
        leave_an_unknown_pack(writer, 1)
        target = disk if moment == "while headers are read" else disk.CacheDirectory
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


# Passing faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES])
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
        monkeypatch.setattr(torch, "from_file", lambda *_, **__: (_ for _ in ()).throw(error))
        with pytest.raises(StoreError, match="cannot be read now"):
            read_batch(store, [key(0)])
        monkeypatch.setattr(pack.mmap, "mmap", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOMEM, "none")))
        report = verify(store)
        assert not report.ok and report.damaged == {} and len(report.unreadable) == 1
        monkeypatch.undo()
        assert verify(store).ok
        assert_holds(store, 0)
