from __future__ import annotations

import os
import pickle
import random
import shutil
import sqlite3
import time
from contextlib import closing

import pytest
from store_samples import fork, run, spawn

from latentcache.errors import IndexDamagedError, ReadOnlyError
from latentcache.store import Index


@pytest.fixture
def index(tmp_path):
    return Index(tmp_path / "index")


def add(index, rows):
    """Add rows, and give the names of those that were not there."""
    with index.transaction() as transaction:
        new = {name: value for name, value in rows.items() if transaction.get(name) is None}
        for name, value in new.items():
            transaction.put(name, value)
        return new.keys()


def test_rows(index):
    assert add(index, {"a": b"1", "b": b"2"}) == {"a", "b"}
    assert add(index, {"a": b"9", "c": b""}) == {"c"}
    assert index.items() == {"a": b"1", "b": b"2", "c": b""}
    index.replace_many({"a": b"9", "d": b"\0\xff"})
    assert index.get_many(["a", "x", "d", "a"]) == {"a": b"9", "d": b"\0\xff"} and index.get_many([]) == {}
    assert index.remove_many(["a", "a", "zzz", "b"]) == 2
    assert index.items() == {"c": b"", "d": b"\0\xff"}
    assert Index(index.path).items() == {"c": b"", "d": b"\0\xff"}


def test_a_transaction_is_all_or_nothing(index):
    add(index, {"a": b"1"})
    with pytest.raises(KeyboardInterrupt), index.transaction() as rows:
        rows.put("a", b"2")
        rows.put("b", b"3")
        assert rows.get("a") == b"2" and rows.remove("a")
        raise KeyboardInterrupt
    assert index.items() == {"a": b"1"}


def add_rows(path, offset):
    index = Index(path)
    for number in range(40):
        add(index, {f"{offset}-{number}": b"x", f"shared-{number}": b"%d" % offset})


@pytest.mark.parametrize("context", [fork, spawn], ids=["fork", "spawn"])
def test_processes_write_at_once(tmp_path, context):
    path = tmp_path / "index"
    processes = [context.Process(target=add_rows, args=(path, offset)) for offset in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    rows = Index(path).items()
    assert len(rows) == 120 and all(rows[f"{offset}-{number}"] == b"x" for offset in range(2) for number in range(40))


def test_read_only(index):
    add(index, {"a": b"1"})
    before = {file.name: file.stat().st_mtime_ns for file in index.path.iterdir()}
    reader = Index(index.path, read_only=True)
    assert reader.items() == {"a": b"1"}
    with pytest.raises(ReadOnlyError):
        add(reader, {"b": b"2"})
    assert {file.name: file.stat().st_mtime_ns for file in index.path.iterdir()} == before
    with pytest.raises(IndexDamagedError, match="does not exist"):
        Index(index.path / "none", read_only=True)
    assert not (index.path / "none").exists()


def test_damage_is_a_typed_error_and_never_a_wrong_row(index):
    """Flipped bits, and a database cut short, at random places: right rows, or IndexDamagedError."""
    rows = {f"key-{number:03}": b"value-%03d" % number * 5 for number in range(60)}
    add(index, rows)
    database = index.path / "cache.db"
    clean = database.read_bytes()
    source = random.Random(2)
    num_refused = 0
    for attempt in range(150):
        data = bytearray(clean)
        if attempt % 5:
            for _ in range(8):
                data[source.randrange(len(data))] ^= 1 << source.randrange(8)
        else:
            del data[source.randrange(len(data)) :]
        database.write_bytes(data)
        try:
            found = Index(index.path, read_only=True).items()
        except IndexDamagedError:
            num_refused += 1
        else:
            # SQLite has no checksums: a flip inside a value goes through. Rows have checksums of their own.
            assert all(type(key) is str and type(value) is bytes for key, value in found.items())
    assert num_refused > 20


def read(index, since=None):
    """The rows that came after `since`, where they bring the reader, and whether they are all rows."""
    with index.reading() as rows:
        position, is_whole, found = rows.since(since)
        return list(found), position, is_whole


def test_what_was_added_later_is_read_alone(index):
    rows, empty, _ = read(index)
    assert rows == [] and empty.generation is not None
    assert read(index, empty) == ([], empty, False)
    add(index, {"a": b"1"})
    assert read(index, empty)[::2] == ([("a", b"1")], False)
    _, position, _ = read(index)
    assert read(index, position) == ([], position, False)
    add(index, {"a": b"9", "b": b"2"})
    rows, later, is_whole = read(index, position)
    assert rows == [("b", b"2")] and not is_whole
    assert read(index, later) == ([], later, False)
    assert index.remove_many(["zzz"]) == 0
    assert read(index, later) == ([], later, False)


CHANGES = {
    "remove": lambda index: index.remove_many(["b"]),
    "replace": lambda index: index.replace_many({"a": b"1"}),
    "add and remove": lambda index: (add(index, {"c": b"3"}), index.remove_many(["a"])),
    "remove and add": lambda index: (index.remove_many(["b"]), add(index, {"b": b"2"})),
}


@pytest.mark.parametrize("by", ["this process", "another process"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_after_a_removal_or_a_replacement_all_is_read(index, change, by):
    add(index, {"a": b"1", "b": b"2"})
    _, position, _ = read(index)
    if by == "this process":
        change(index)
    else:
        assert run(change, index) == 0
    rows, later, is_whole = read(index, position)
    assert is_whole and dict(rows) == index.items() and later.generation != position.generation
    assert read(index, later) == ([], later, False)


def test_another_index_in_its_place_is_noticed(index):
    """As after a rebuild: it has the same rows in the same order, with other values, and never had any others."""
    add(index, {"a": b"1", "b": b"2"})
    _, position, _ = read(index)
    shutil.rmtree(index.path)
    add(Index(index.path), {"a": b"3", "b": b"4"})
    assert read(index, position)[::2] == ([("a", b"3"), ("b", b"4")], True)


def test_nothing_changes_while_rows_are_read(index):
    rows = {str(number): b"1" for number in range(200)}
    index.replace_many(rows)
    begun = fork.Event()

    def change():
        begun.wait(60)
        add(index, {"later": b"1"})

    process = fork.Process(target=change)
    process.start()
    with index.reading() as reading:
        begun.set()
        time.sleep(0.3)
        position, _, found = reading.since()
        assert dict(found) == rows
    process.join(60)
    assert process.exitcode == 0
    assert read(index, position)[::2] == ([("later", b"1")], False)


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["a", "generation", "new"])
def test_nothing_is_unpickled(index, tmp_path, name):
    add(index, {"a": b"1"})
    with closing(sqlite3.connect(index.path / "cache.db")) as connection, connection:
        row = "INSERT OR REPLACE INTO Cache (key, raw, store_time, size, mode, value) VALUES (?, 1, 0, 0, 4, ?)"
        connection.execute(row, (name, pickle.dumps(Bomb(tmp_path / "exploded"))))
    with pytest.raises(IndexDamagedError):
        Index(index.path).items()
    with pytest.raises(IndexDamagedError):
        add(Index(index.path), {name: b"2"})
    assert not (tmp_path / "exploded").exists()
