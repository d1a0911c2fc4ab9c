"""A cache directory that somebody else prepared: nothing in it is run, and nothing outside it is read or deleted."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import sqlite3
import time

import pytest
import torch
import xxhash

from latentcache.errors import EntryDamagedError, EntryMissingError, IndexDamagedError, StoreError
from latentcache.identity import key_of
from latentcache.store import DiskStore, Index
from latentcache.store.catalog import parsed_row
from latentcache.store.directory import CacheDirectory
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
    "a file next to a value": lambda pack, bomb, victim: (pack, 1, 1, str(victim), b"bytes"),
    "text as a value": lambda pack, bomb, victim: (pack, 1, 1, None, "text"),
    "a number as a key": lambda pack, bomb, victim: (7, 1, 1, None, b"bytes"),
    "an unknown mode": lambda pack, bomb, victim: (pack, 1, 99, None, b"bytes"),
    "other bytes": lambda pack, bomb, victim: (pack, 1, 1, None, b"bytes"),
    "no bytes": lambda pack, bomb, victim: (pack, 1, 1, None, b""),
    "a pack that is a path": lambda pack, bomb, victim: ("pack:../../victim", 1, 1, None, b"bytes"),
    "a row of no pack": lambda pack, bomb, victim: (key(0), 1, 1, None, b"bytes"),
    "a huge row": lambda pack, bomb, victim: (OTHER, 1, 1, None, b"x" * (8 << 20)),
    "a deep row": lambda pack, bomb, victim: (OTHER, 1, 1, None, summed(b"\xa0\x86\1\0" + b"[" * 100_000)),
}


def summed(data):
    """With the checksum that makes it a row."""
    return data + xxhash.xxh3_64(data).digest()


def pack_row(root):
    """The name and the value of the row of the only pack."""
    ((name, value),) = Index(root / "index", read_only=True).items().items()
    return name, value


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_planted_row_is_neither_run_nor_followed(root, victim, tmp_path, row):
    bomb = tmp_path / "exploded"
    plant(root, ROW, *row(pack_row(root)[0], pickle.dumps(Bomb(bomb)), victim))
    assert use(root) == {key(0), key(2)}
    assert not bomb.exists() and victim.read_text() == "precious"
    assert [name for name in os.listdir(root) if name.startswith("index.damaged-")]


@pytest.mark.parametrize("change", ["mode = 4", "raw = 0", "filename = '../../victim.val'", "expire_time = 1"])
def test_a_changed_row_is_refused_by_the_index_itself(root, victim, change):
    name, _ = pack_row(root)
    plant(root, f"UPDATE Cache SET {change} WHERE key = ?", name)
    for read_only in (False, True):
        with pytest.raises(IndexDamagedError):
            Index(root / "index", read_only=read_only).items()
    # A process that had the index open before: a changed row is refused one by one too, and no file is removed.
    index = Index(root / "index")
    for call in (lambda: index.remove_many([name]), lambda: index.replace_many({name: b"x"})):
        try:
            call()
        except IndexDamagedError:
            continue
    assert victim.read_text() == "precious"


def column(number, value):
    def change(head):
        head["groups"][0][2][0][number] = value

    return change


FORGERIES = {
    "another place": column(3, 128),
    "a place beyond the file": (column(3, 1 << 40), lambda head: head.update(file_bytes=1 << 41)),
    "the end of the file": lambda head: column(3, head["file_bytes"] - 128)(head),
    "another dtype": column(1, "int32"),
    "another shape": column(2, [2, 8]),
    "another field": column(0, "latents"),
    "another kind": lambda head: head["groups"][0].__setitem__(0, "text"),
    "ragged": (column(2, [4]), column(4, 8), column(5, 0)),
    "more bytes": lambda head: head.update(file_bytes=head["file_bytes"] + 1),
    "gone": lambda head: head.update(is_gone=True),
    "damaged": lambda head: head.update(reasons={"0": "x" * 1000}),
}


def forged(value, changes, arrays):
    """A row with a changed head, and its arrays as `arrays` makes them, with a checksum that fits."""
    end = 4 + int.from_bytes(value[:4], "little")
    head = json.loads(value[4:end])
    for change in changes if isinstance(changes, tuple) else (changes,):
        change(head)
    text = json.dumps(head).encode()
    return summed(len(text).to_bytes(4, "little") + text + arrays(value[end:-8]))


def never_a_wrong_tensor(root):
    for read_only in (True, False):
        with DiskStore(root, read_only=read_only) as store:
            for number in range(2):
                for call in (store.get, store.record, store.describe, lambda name: store.rows([name])):
                    try:
                        found = call(key(number))
                    except (EntryDamagedError, EntryMissingError):
                        continue
                    if call == store.get:
                        assert torch.equal(found.tensors["moments"], entry(number).tensors["moments"])
                        assert found.record == entry(number).record
            verify(store)
            store.stats()
    rebuild(root)
    with DiskStore(root) as store:
        assert set(store.keys()) == {key(0), key(1)}
        assert torch.equal(store.get(key(1)).tensors["moments"], entry(1).tensors["moments"])


def check_in_a_process(root):
    """A wrong place that is touched would kill the process (SIGBUS)."""
    process = multiprocessing.get_context("fork").Process(target=never_a_wrong_tensor, args=(root,))
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize("changes", FORGERIES.values(), ids=FORGERIES)
def test_a_row_with_a_good_checksum_is_still_not_believed(root, changes):
    name, value = pack_row(root)
    plant(root, "UPDATE Cache SET value = ? WHERE key = ?", forged(value, changes, bytes), name)
    check_in_a_process(root)


@pytest.mark.parametrize(
    "arrays",
    [
        lambda data: data[32:64] + data[:32] + data[64:],  # keys
        lambda data: bytes(64) + data[64:],
        lambda data: data[:64] + data[80:96] + data[64:80] + data[96:],  # digests
        lambda data: data[:32] + data[:32] + data[64:80] * 2 + data[96:],
        lambda data: data[:96] + b"\0",  # none is live
    ],
    ids=["keys exchanged", "zeros", "digests exchanged", "a key twice", "none is live"],
)
def test_a_row_with_other_keys_or_digests_is_not_believed(root, arrays):
    name, value = pack_row(root)
    plant(root, "UPDATE Cache SET value = ? WHERE key = ?", forged(value, (), arrays), name)
    check_in_a_process(root)


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


def header_of(num_tensors, metadata=None):
    """A safetensors file of so many empty tensors."""
    tensors = {f"{number:x}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for number in range(num_tensors)}
    text = json.dumps(
        ({} if metadata is None else {"__metadata__": metadata}) | tensors, separators=(",", ":")
    ).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("num_tensors", "metadata", "problem"),
    [
        (200_000, None, "at most 1,048,576 are allowed"),
        (15_000, None, "pack format None"),
        (15_000, {"latentcache": "2"}, "15,000 tensors; at most 8,192 are allowed"),
    ],
)
def test_a_header_of_very_many_tensors_is_read_once_and_refused(root, caplog, num_tensors, metadata, problem):
    (root / "packs" / "ab").mkdir(exist_ok=True)
    path = root / "packs" / "ab" / f"{'ab' * 16}.safetensors"
    path.write_bytes(header_of(num_tensors, metadata))
    start = time.thread_time()
    with DiskStore(root, read_only=True) as store:
        assert set(store.keys()) == {key(0), key(1)} and store.stats().num_packs == 2
        store.damaged()
    (warning,) = [record.getMessage() for record in caplog.records if path.name in record.getMessage()]
    assert problem in warning and "latentcache compact" in warning
    with DiskStore(root) as store:
        assert problem in verify(store).unreadable[path.stem]
        assert problem in compact(store).put_aside[path.stem]
        assert verify(store).ok
    assert time.thread_time() - start < 10


@pytest.mark.parametrize("per_group", [1, 3000])
def test_a_row_of_very_many_columns_is_refused(root, per_group):
    """Work is bounded, not only bytes: a row of 8 MiB could have a quarter of a million columns."""
    groups = [["image", 1, [[f"f{n}", "uint8", [1], 0, 1, None] for n in range(per_group)]]] * (9000 // per_group)
    head = json.dumps({"file_bytes": 1 << 40, "groups": groups, "is_gone": False, "reasons": {}})
    num = len(groups)
    data = len(head).to_bytes(4, "little") + head.encode() + os.urandom(num * 32) + bytes(num * 16 + (num + 7) // 8)
    plant(root, ROW, OTHER, 1, 1, None, summed(data))
    with pytest.raises(IndexDamagedError, match="more than 2,048 columns"):
        parsed_row(OTHER, summed(data), CacheDirectory(root))
    start = time.thread_time()
    assert use(root) == {key(0), key(2)}
    assert time.thread_time() - start < 10


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
