"""A cache directory that somebody else prepared: nothing in it is run, and nothing outside it is read or deleted."""

from __future__ import annotations

import os
import pickle
import shutil
import sqlite3

import pytest
import torch

from latentcache.errors import IndexDamagedError, StoreError
from latentcache.identity import key_of
from latentcache.store import DiskStore, Index
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
ROWS = {
    "a pickle as a value": lambda bomb, victim: (key(0), 1, 4, None, bomb),
    "a pickle as a key": lambda bomb, victim: (bomb, 0, 1, None, "text"),
    "a file as a value": lambda bomb, victim: (key(0), 1, 2, str(victim), None),
    "a file as a text": lambda bomb, victim: (key(0), 1, 3, "../../victim.val", None),
    "a file with pickle": lambda bomb, victim: (key(2), 1, 4, str(victim), None),
    "a file beside a value": lambda bomb, victim: (key(0), 1, 1, str(victim), "text"),
    "bytes as a value": lambda bomb, victim: (key(0), 1, 1, None, b"bytes"),
    "a number as a key": lambda bomb, victim: (7, 1, 1, None, "text"),
    "an unknown mode": lambda bomb, victim: (key(0), 1, 99, None, "text"),
    "a pack that is a path": lambda bomb, victim: ("pack:../../victim", 1, 1, None, "8 8"),
    "a huge row": lambda bomb, victim: (key(2), 1, 1, None, "x" * (8 << 20)),
    "a deep row": lambda bomb, victim: (key(2), 1, 1, None, "[" * 100_000),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_planted_row_is_neither_run_nor_followed(root, victim, tmp_path, row):
    bomb = tmp_path / "exploded"
    plant(root, ROW, *row(pickle.dumps(Bomb(bomb)), victim))
    assert use(root) == {key(0), key(2)}
    assert not bomb.exists() and victim.read_text() == "precious"
    assert [name for name in os.listdir(root) if name.startswith("index.damaged-")]


@pytest.mark.parametrize("change", ["mode = 4", "raw = 0", "filename = '../../victim.val'", "expire_time = 1"])
def test_a_changed_row_is_refused_by_the_index_itself(root, victim, change):
    for name in (key(0), "pack"):
        plant(root, f"UPDATE Cache SET {change} WHERE key LIKE ?", name + "%")
    for read_only in (False, True):
        with pytest.raises(IndexDamagedError):
            Index(root / "index", read_only=read_only).items()
    # A process that had the index open before: a changed row is refused one by one too, and no file is removed.
    index = Index(root / "index")
    for call in (lambda: index.remove_many([key(0)]), lambda: index.replace_many({key(0): "x"})):
        try:
            call()
        except IndexDamagedError:
            continue
    assert victim.read_text() == "precious"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sqlite_user_version", 77),
        ("sqlite_writable_schema", 1),
        ("sqlite_journal_mode", "off"),
        ("sqlite_mmap_size", "0; DROP TABLE Cache"),
        ("sqlite_temp_store_directory", "'/tmp'"),
        ("disk_directory", "/tmp"),
        ("eviction_policy", b"none"),
        ("unknown", 1),
    ],
)
def test_planted_settings_are_not_run(root, name, value):
    plant(root, "INSERT OR REPLACE INTO Settings VALUES (?, ?)", name, value)
    with pytest.raises(IndexDamagedError, match="setting"):
        Index(root / "index")
    assert use(root) == {key(0), key(2)}
    (aside,) = root.glob("index.damaged-*")
    connection = sqlite3.connect(aside / "cache.db")
    assert connection.execute("PRAGMA user_version").fetchone() == (0,)
    connection.close()


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TRIGGER evil AFTER INSERT ON Cache BEGIN DELETE FROM Cache; END",
        "CREATE VIEW other AS SELECT * FROM Cache",
        "CREATE TABLE more (x)",
    ],
)
def test_a_planted_schema_is_refused(root, sql):
    plant(root, sql)
    with pytest.raises(IndexDamagedError):
        Index(root / "index")
    assert use(root) == {key(0), key(2)}


def test_a_journal_that_names_a_file_deletes_nothing(root, victim):
    name = str(victim).encode()
    tail = name + len(name).to_bytes(4, "big") + sum(name).to_bytes(4, "big") + bytes.fromhex("d9d505f920a163d7")
    magic = bytes.fromhex("d9d505f920a163d7")
    (root / "index" / "cache.db-journal").write_bytes(magic + bytes(504) + b"\0\0\0\1" + tail)
    assert use(root) == {key(0), key(2)}
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["cache.db", "cache.db-journal", "cache.db-wal"])
def test_links_in_the_index_are_not_followed(root, victim, name):
    path = root / "index" / name
    path.unlink(missing_ok=True)
    path.symlink_to(victim)
    assert use(root) == {key(0), key(2)}
    assert victim.read_text() == "precious"


def the_pack(root):
    (path,) = root.glob("packs/*/*.safetensors")
    return path


@pytest.mark.parametrize("what", ["link", "pipe", "folder", "device"])
def test_only_regular_files_are_packs(root, tmp_path, what):
    path = the_pack(root)
    outside = tmp_path / "outside.safetensors"
    shutil.move(path, outside)
    if what == "link":
        path.symlink_to(outside)
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif os.getuid() == 0:
        os.mknod(path, 0o020666, os.makedev(1, 5))  # /dev/zero has no end
    else:
        pytest.skip("devices are made by root only")
    with DiskStore(root, read_only=True) as store, pytest.raises(StoreError):
        store.get(key(0))
    assert use(root) == {key(2)}
    assert outside.exists() and os.path.lexists(path)


def test_a_linked_folder_of_packs_is_not_entered(root, tmp_path):
    folder = the_pack(root).parent
    outside = tmp_path / "outside"
    shutil.move(folder, outside)
    folder.symlink_to(outside)
    half = outside / ".x.tmp"
    half.write_text("somebody else's")
    with DiskStore(root, read_only=True) as store, pytest.raises(StoreError):
        store.get(key(0))
    assert use(root) == {key(2)}
    assert len(list(outside.glob("*.safetensors"))) == 1 and half.exists()


@pytest.mark.parametrize("what", ["link", "pipe"])
def test_odd_temporary_files_are_left_alone(root, victim, what):
    path = the_pack(root).parent / ".planted.tmp"
    if what == "link":
        path.symlink_to(victim)
    else:
        os.mkfifo(path)
    DiskStore(root).close()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["../../../../victim", "a" * 31 + "/", "A" * 32, "", "a" * 33])
def test_a_pack_id_is_never_a_path(root, name):
    with DiskStore(root) as store, pytest.raises(StoreError):
        store.directory.pack_path(name)
