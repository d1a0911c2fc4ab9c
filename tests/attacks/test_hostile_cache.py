"""A cache's index that somebody else prepared: nothing in it is unpickled, and nothing outside the cache is touched."""

from __future__ import annotations

import os
import pickle
import sqlite3

import pytest
import torch

from latentcache.errors import StoreError
from latentcache.identity import key_of
from latentcache.store import DiskStore
from latentcache.store.upkeep import compact, prune, rebuild, verify
from latentcache.types import Entry, Record


class Bomb:
    """Unpickled, it makes a directory."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def entry(number):
    identity = {"number": number}
    return Entry(Record(key_of(identity), "image", identity, {}), {"moments": torch.full((4, 4), float(number))})


def key(number):
    return entry(number).record.key


@pytest.fixture
def root(tmp_path):
    with DiskStore(tmp_path / "cache") as store:
        store.add([entry(0), entry(1)])
    return tmp_path / "cache"


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim.val"
    path.write_text("precious")
    return path


def plant(root, sql, *values):
    connection = sqlite3.connect(root / "index" / "cache.db")
    with connection:
        connection.execute(sql, values)
    connection.close()


def use(root):
    """Everything that a store can be asked to do."""
    with DiskStore(root, read_only=True) as store:
        list(store.keys())
        store.find([key(0), key(2)])
    with DiskStore(root) as store:
        for number in range(3):
            if store.find([key(number)]):
                assert torch.equal(store.get(key(number)).tensors["moments"], entry(number).tensors["moments"])
        store.add([entry(2)])
        store.remove([key(1)])
        store.stats()
        verify(store)
        prune(store, [key(0), key(2)])
        compact(store)
        rebuild(store)
        assert torch.equal(store.get(key(2)).tensors["moments"], entry(2).tensors["moments"])
    with DiskStore(root) as store:
        return set(store.keys())


ROW = "INSERT OR REPLACE INTO Cache (key, raw, store_time, size, mode, filename, value) VALUES (?, ?, 0, 0, ?, ?, ?)"
OTHER = "pack:" + "0" * 32
ROWS = {
    "a pickle as a value": lambda pack, bomb, victim: (pack, 1, 4, None, bomb),
    "a pickle as bytes": lambda pack, bomb, victim: (pack, 1, 1, None, bomb),
    "a pickle as a key": lambda pack, bomb, victim: (bomb, 0, 1, None, b"bytes"),
    "a pickle as a generation": lambda pack, bomb, victim: ("generation", 1, 4, None, bomb),
    "a file as a value": lambda pack, bomb, victim: (pack, 1, 2, str(victim), None),
    "a file as a text": lambda pack, bomb, victim: (pack, 1, 3, "../../victim.val", None),
    "a file with pickle": lambda pack, bomb, victim: (OTHER, 1, 4, str(victim), None),
    "text as a value": lambda pack, bomb, victim: (pack, 1, 1, None, "text"),
    "a number as a key": lambda pack, bomb, victim: (7, 1, 1, None, b"bytes"),
    "an unknown mode": lambda pack, bomb, victim: (pack, 1, 99, None, b"bytes"),
    "other bytes": lambda pack, bomb, victim: (pack, 1, 1, None, b"bytes"),
    "no bytes": lambda pack, bomb, victim: (pack, 1, 1, None, b""),
    "a pack that is a path": lambda pack, bomb, victim: ("pack:../../victim", 1, 1, None, b"bytes"),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_planted_row_is_neither_run_nor_followed(root, victim, tmp_path, row, caplog):
    bomb = tmp_path / "exploded"
    with DiskStore(root, read_only=True) as store:
        (pack,) = store.directory.pack_sizes()
    plant(root, ROW, *row(f"pack:{pack}", pickle.dumps(Bomb(bomb)), victim))
    assert use(root) == {key(0), key(2)}
    assert not bomb.exists() and victim.read_text() == "precious"
    assert "made again from the packs" in caplog.text


@pytest.mark.parametrize("what", ["pipe", "folder"])
def test_only_regular_files_are_packs(root, what):
    (path,) = root.glob("packs/*/*.safetensors")
    path.unlink()
    os.mkfifo(path) if what == "pipe" else path.mkdir()
    with DiskStore(root, read_only=True) as store, pytest.raises(StoreError):
        store.get(key(0))
    assert use(root) == {key(2)}


@pytest.mark.parametrize("name", ["../../../../victim", "a" * 31 + "/", "A" * 32, "", "a" * 33])
def test_a_pack_id_is_never_a_path(root, name):
    with DiskStore(root) as store, pytest.raises(StoreError):
        store.directory.pack_path(name)
